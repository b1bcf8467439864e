"""A model that TRL trains on packed files sees the loss of the same documents, run one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.data.packing import pack_files

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def small_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(127)} | {"<end>": 127}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def write_corpus(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt": " ".join(f"w{i}" for i in rng.integers(1, 127, size=rng.integers(1, 9))) + " ",
            "completion": " ".join(f"w{i}" for i in rng.integers(1, 127, size=rng.integers(1, 20))),
        }
        for _ in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(rows: Any) -> list[tuple[Any, Any]]:
    found = []
    for row in rows:
        at = 0
        for length in row["seq_lengths"]:
            cut = slice(at, at + length)
            found.append((torch.tensor([row["input_ids"][cut]]), torch.tensor([row["labels"][cut]])))
            at += length
    return found


def one_by_one(model: Any, rows: Any) -> tuple[float, dict[str, Any]]:
    """Token mean over the documents of some packs, each run alone, and its gradients."""
    model.zero_grad()
    targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in documents(rows))
    total = 0.0
    for ids, labels in documents(rows):
        logits = model(input_ids=ids).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_trl_trains_on_packs_as_on_single_documents(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    source = write_corpus(tmp_path / "rows.jsonl")
    result = pack_files(source, tmp_path / "packs", capacity=96, tokenizer=tokenizer())
    packs = datasets.load_dataset(
        "parquet", data_files=[str(path) for path in result.shards], split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(packs) < 40
    model = small_model()
    args = SFTConfig(
        output_dir=str(tmp_path / "out"),
        padding_free=True,
        max_length=None,
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        shuffle_dataset=False,
        seed=0,
    )
    trainer = SFTTrainer(model, args, train_dataset=packs, processing_class=tokenizer())
    seen: list[list[int]] = []
    collate = trainer.data_collator

    def spy(examples: list[dict[str, Any]]) -> Any:
        seen.append([packs["input_ids"][:].index(example["input_ids"]) for example in examples])
        return collate(examples)

    trainer.data_collator = spy
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    twin = small_model()
    expected = []
    for chosen in seen[:3]:
        loss, gradients = one_by_one(twin, [packs[i] for i in chosen])
        expected.append(loss)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter -= 0.05 * gradients[name]
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, trained), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained, other, rtol=1e-4, atol=1e-6, msg=name)
