"""A recommendation as text to paste."""

from __future__ import annotations

from typing import Any

from padless.analysis.recommend import NOTHING
from padless.analysis.schedule import Setup
from padless.cost import DEFAULT_COST, CostModel

__all__ = ["FRAMEWORKS", "settings_for"]

FRAMEWORKS = ("pytorch", "transformers", "trl", "verl", "lightning")
"""Keys of the texts among the settings."""

_GROUPING = {"step-greedy": "step", "step-balanced": "step", "pool": "pool", "range": "range", "sorted": "sorted"}


def settings_for(strategy: str, setup: Setup) -> dict[str, Any]:
    """Values by name, and for each of `FRAMEWORKS` a text to paste."""
    if strategy == NOTHING:
        return {}
    values: dict[str, Any] = {
        "token_budget": setup.token_budget,
        "sequences_per_step": setup.sequences_per_step,
        "ranks": setup.ranks,
    }
    if strategy == "packed":
        return {**values, "capacity": setup.token_budget, "layout": "packed", **_packed(setup)}
    method = "greedy" if strategy == "step-greedy" else "balanced"
    grouping = _GROUPING.get(strategy, "step")
    return {**values, "grouping": grouping, "method": method, "layout": "padded", **_padded(setup, grouping, method)}


def _padded(setup: Setup, grouping: str, method: str) -> dict[str, str]:
    budget, size = setup.token_budget, setup.sequences_per_step
    per_rank = max(1, size // setup.ranks)
    sampler = _sampler(setup, grouping, method)
    options, name, cost = _trainer_options(setup, method)
    made = {
        "pytorch": sampler + "\n# sampler.at_step_boundary says when to call optimizer.step()",
        "transformers": f"""\
from transformers import Trainer
{cost}from padless.integrations.transformers import {name}

# per_device_train_batch_size x gradient_accumulation_steps = {per_rank} sequences on each rank, as before
trainer = with_padless(Trainer)(model, args, train_dataset=dataset, data_collator=collator, {options})""",
        "trl": f"""\
from trl import SFTTrainer  # or DPOTrainer, GRPOTrainer
{cost}from padless.integrations.trl import {name}

trainer = with_padless(SFTTrainer)(model, args, train_dataset=dataset, {options})""",
        "verl": f"""\
actor_rollout_ref.model.external_lib=padless.integrations.verl
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget}""",
        "lightning": _lightning(options, cost, per_rank) if grouping == "step" else sampler + _OWN_RANKS,
    }
    if grouping != "step":
        for name in ("transformers", "trl", "verl"):
            made[name] = f"# steps are drawn by the trainer here: regrouped inside, without {grouping}\n" + made[name]
    return made


def _sampler(setup: Setup, grouping: str, method: str) -> str:
    """The sampler with all that the figures shown were planned with: its own cost, and method, are others."""
    multiple = "" if setup.multiple_of == 1 else f"multiple_of={setup.multiple_of}"
    planned = f', method="{method}"' if grouping == "step" else ""
    return f"""\
from torch.utils.data import DataLoader
from padless import CostModel
from padless.data import PaddedCollator, TokenBudgetSampler, measure

# dataset: your rows as they are trained on: tokenised, each with input_ids (and labels), no longer text
lengths = measure(dataset)
cost = {_cost(setup.cost)}  # what the figures assume
sampler = TokenBudgetSampler(
    lengths, token_budget={setup.token_budget}, sequences_per_step={setup.sequences_per_step},
    grouping="{grouping}"{planned}, cost=cost{", " + multiple if multiple else ""},
)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator({multiple}))"""


def _trainer_options(setup: Setup, method: str) -> tuple[str, str, str]:
    """Arguments of a host's constructor, what to import for them, and the import of the cost model, if needed."""
    given = [f"token_budget={setup.token_budget}"]
    if method != "balanced":
        given.append(f'method="{method}"')
    own_cost = _coefficients(setup.cost) != _coefficients(DEFAULT_COST)
    if own_cost:
        given.append(f"cost={_cost(setup.cost)}")
    if setup.multiple_of != 1:
        given.append(f"multiple_of={setup.multiple_of}")
    if len(given) == 1:
        return given[0], "with_padless", ""
    imported = "from padless import CostModel\n" if own_cost else ""
    return f"padless=PadlessOptions({', '.join(given)})", "PadlessOptions, with_padless", imported


_TERMS = ("per_microbatch", "per_column", "per_token", "per_token_squared")


def _coefficients(cost: CostModel) -> tuple[float, ...]:
    return tuple(getattr(cost, name) for name in _TERMS)


def _cost(cost: CostModel) -> str:
    """The cost model as an expression; terms that are the class's own are left out, but the fixed part."""
    plain = _coefficients(CostModel())
    terms = zip(_TERMS, _coefficients(cost), plain, strict=True)
    return f"CostModel({', '.join(f'{n}={v!r}' for n, v, usual in terms if v != usual or n == _TERMS[0])})"


_OWN_RANKS = "\n# trainer = lightning.Trainer(use_distributed_sampler=False, ...): the sampler knows the ranks"


def _lightning(options: str, cost: str, per_rank: int) -> str:
    needed = "PadlessModuleMixin" + (", PadlessOptions" if "PadlessOptions" in options else "")
    return f"""\
import lightning
{cost}from padless.integrations.lightning import {needed}

class Module(PadlessModuleMixin, lightning.LightningModule):
    def token_losses(self, inputs): ...  # cross entropy of each token, not reduced

module = Module({options})  # one batch of the loader ({per_rank} rows on each rank) is an optimizer step"""


def _packed(setup: Setup) -> dict[str, str]:
    capacity = setup.token_budget
    pack = f"padless pack DATA --out packs --capacity {capacity} --tokenizer TOKENIZER"
    load = 'dataset = load_dataset("parquet", data_files="packs/*.parquet", split="train")'
    loader = f"""\
# {pack}
from datasets import load_dataset
from torch.utils.data import DataLoader
from padless.data import PackedCollator

{load}
loader = DataLoader(dataset, batch_size=1, shuffle=True, collate_fn=PackedCollator())"""
    return {
        "pytorch": loader + "\n# model.config.use_cache = False: packed rows need it",
        "transformers": loader.replace(
            "from torch.utils.data import DataLoader\n", "from transformers import Trainer\n"
        ).replace(
            "loader = DataLoader(dataset, batch_size=1, shuffle=True, collate_fn=PackedCollator())",
            "trainer = Trainer(model, args, train_dataset=dataset, data_collator=PackedCollator())",
        ),
        "trl": f"""\
# {pack}
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

{load}
args = SFTConfig(padding_free=True, max_length=None, per_device_train_batch_size=1)
trainer = SFTTrainer(model, args, train_dataset=dataset)""",
        "verl": f"""\
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu={capacity}
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={capacity}""",
        "lightning": loader,
    }
