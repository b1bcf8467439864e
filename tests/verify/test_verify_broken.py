"""Models broken on purpose are caught, each with its cause; the same model unbroken is exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from padless.verify import LayoutReport, check_layouts
from support.broken import CausalMix, Decoder, decoder

PADDED = ("left-padded", "right-padded", "right-padded-no-mask")


def report_of(broken: str, *layouts: str, **options: object) -> LayoutReport:
    return check_layouts(decoder(broken, **options), layouts=layouts or ("packed-position-ids",), cache=False)


@pytest.mark.parametrize("window", [None, 4])
def test_the_unbroken_decoder_is_exact_in_every_layout_it_can_take(window):
    report = report_of("", *PADDED, "packed-position-ids", "naive", window=window)
    assert {name: result.verdict for name, result in report.layouts.items()} == {
        **dict.fromkeys((*PADDED, "packed-position-ids"), "exact"),
        "naive": "leaks",
    }
    assert report["naive"].cause == "attention-boundary"
    assert all(result.support == 0.0 for name, result in report.layouts.items() if name != "naive")
    assert report["packed-position-ids"].difference < report["packed-position-ids"].tolerance


@pytest.mark.parametrize(
    ("broken", "cause", "module", "words"),
    [
        ("convolution", "convolution", "layers.0.extra (CausalMix)", "convolution runs over the sequence boundary (2"),
        ("boundary off by one", "boundary-off-by-one", "layers.0.attention", "off by one"),
        ("window off by one", "window", "layers.0.attention", "window or chunk is not applied"),
        ("position ids", "position-ids-ignored", "layers.0.attention", "ignores position_ids"),
        ("positions only", "positions", "embed_positions", "positions depend on"),
        ("batch statistics", "batch-statistics", "layers.0.extra (Centre)", "batch statistics"),
        ("state between calls", "carried-state", "layers.0.extra (Memory)", "carried from one call to the next"),
        ("recurrence", "recurrent-state", "layers.0.extra (Decay)", "recurrent state is not reset"),
        ("capacity", "router", None, "over all tokens together"),
        ("sink", "attention-boundary", "layers.0.attention", "reads over the sequence boundary"),
        ("shared prefix", "attention-boundary", "layers.0.attention", "reads over the sequence boundary"),
    ],
)
def test_each_mistake_is_named_with_the_module_where_it_enters(broken, cause, module, words):
    options = {"window": 4} if broken.startswith("window") else {}
    result = report_of(broken, **options)["packed-position-ids"]
    assert result.verdict == "leaks"
    assert result.cause == cause
    assert words in result.explain()
    assert module is None or (result.module or "").startswith(module)


@pytest.mark.parametrize(
    ("broken", "leaking"),
    [
        ("training only", {"train": "leaks", "train-no-grad": "leaks", "eval-no-grad": "exact"}),
        ("no gradient", {"train": "exact", "train-no-grad": "leaks", "eval-no-grad": "leaks"}),
    ],
)
def test_a_leak_in_one_mode_only_is_a_leak_and_the_mode_is_named(broken, leaking):
    result = report_of(broken)["packed-position-ids"]
    assert result.verdict == "leaks"
    assert dict(result.modes) == leaking
    assert "Only in " in result.why
    assert result.cause == "convolution"


def test_batch_statistics_and_states_are_caught_in_padded_layouts_too():
    report = report_of("batch statistics", "right-padded")
    assert report["right-padded"].verdict == "leaks"
    assert report["right-padded"].cause == "batch-statistics"
    assert report_of("state between calls", "right-padded")["right-padded"].cause == "carried-state"


def test_a_convolution_reads_left_padding():
    result = report_of("convolution", "left-padded")["left-padded"]
    assert result.verdict == "leaks"
    assert result.cause == "convolution"
    assert "tokens of padding change" in result.why


def test_randomness_beyond_dropout_is_inconclusive_never_exact():
    result = report_of("random")["packed-position-ids"]
    assert result.verdict == "inconclusive"
    assert "random beyond dropout" in result.why
    assert "Jitter" in result.why


def test_dropout_does_not_disturb_the_verdict():
    model = decoder()
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.5))
    drop = nn.functional.dropout
    forward = model.head.forward
    model.head.forward = lambda hidden: forward(drop(hidden, 0.5, training=model.training))
    report = check_layouts(model, layouts=["packed-position-ids"], cache=False)
    assert report["packed-position-ids"].verdict == "exact"
    assert model.norm[1].p == 0.5


class Faint(Decoder):
    """A leak far below the rounding of half precision, or one behind weights that are all zero."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.mix = CausalMix(32)
        with torch.no_grad():
            self.mix.weight[:2] *= strength
            self.mix.weight[2] = 0
        self.norm = nn.Sequential(Residual(self.mix), self.norm)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden)


@pytest.mark.parametrize("strength", [1e-4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faint_leak_and_one_behind_zero_weights_are_found_in_any_precision(strength, dtype):
    torch.manual_seed(0)
    model = Faint(strength).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = check_layouts(model, layouts=["packed-position-ids"], cache=False)["packed-position-ids"]
    assert result.verdict == "leaks"
    assert result.cause == "convolution"
    after = model.state_dict()
    assert all(after[name].dtype == dtype and torch.equal(after[name], value) for name, value in before.items())


def test_a_model_that_mixes_nothing_cannot_be_judged():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.head = nn.Linear(16, 64)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return self.head(self.embed(input_ids))

    report = check_layouts(Words(), layouts=["right-padded", "packed-position-ids"], cache=False)
    assert [result.verdict for result in report.layouts.values()] == ["inconclusive", "inconclusive"]
    assert "too weakly" in report["right-padded"].why
    assert report.best is None
    assert report.safe == ()


def test_without_token_embeddings_the_gradient_test_cannot_run_and_nothing_is_called_exact():
    class OneHot(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 32))
            self.embed_tokens = nn.Identity()

        def get_input_embeddings(self):
            raise NotImplementedError

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            self.embed_tokens = Lookup(self.table)
            return super().forward(input_ids, attention_mask, position_ids)

    class Lookup(nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.look = lambda ids: table[ids]

        def forward(self, ids):
            return self.look(ids)

    result = check_layouts(OneHot(), layouts=["packed-position-ids"], vocab_size=64, cache=False)["packed-position-ids"]
    assert result.verdict == "inconclusive"
    assert dict(result.modes)["eval-no-grad"] == "exact"
