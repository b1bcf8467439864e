"""What `regroup` says about input that cannot be right: the key, what it holds, and the way out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from padless import PadlessError, compact, flatten, regroup
from padless.tensors import MROPE, Field, layouts, preference, rlhf, seq2seq, vision
from padless.verify import build_small, check_step


def batch_of(rows: int = 16, width: int = 12, **more: Any) -> dict[str, Any]:
    ids = torch.arange(rows * width).reshape(rows, width) % 50 + 1
    mask = (torch.arange(width) < torch.arange(1, rows + 1).clamp(max=width)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, **more}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"labels": torch.ones(10, 12)},
            r"'labels' has shape \(10, 12\), but 'attention_mask' .*\(16, 12\): 10 rows",
        ),
        (
            {"labels": torch.ones(16, 7)},
            r"'labels' has shape \(16, 7\), but 'attention_mask' .*\(16, 12\): 7 columns",
        ),
        (
            {"attention_mask": torch.ones(16, 9)},
            r"'attention_mask' has shape \(16, 9\), but 'input_ids' has \(16, 12\): a mask",
        ),
        (
            {"attention_mask": torch.ones(10, 12)},
            r"'attention_mask' has shape \(10, 12\), but 'input_ids' .*\(16, 12\)",
        ),
        (
            {"input_ids": torch.rand(16, 12)},
            r"'input_ids' has dtype torch.float32; .*inputs_embeds",
        ),
        ({"position_ids": torch.ones(3, 16, 12)}, r"positions of several axes need .*MROPE"),
        ({"labels": torch.ones(12, 16)}, r"12 rows \(axis 0\) for 16.*Field\(batch_axis"),
        ({"rewards": torch.ones(10)}, "'rewards' has 10 entries; the batch has 16 rows"),
    ],
)
def test_the_key_whose_shape_or_type_is_odd_is_named(change: dict[str, Any], said: str) -> None:
    for call in (lambda batch: regroup(batch, 64), compact):
        with pytest.raises(PadlessError, match=said):
            call(batch_of() | change)


def test_a_label_of_another_number_of_rows_is_not_to_be_declared_anew() -> None:
    with pytest.raises(PadlessError) as caught:
        regroup(batch_of(labels=torch.ones(10, 12)), 64)
    assert "fields=" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_float_mask_of_zeros_and_ones_is_a_mask_and_a_half_is_not(dtype: torch.dtype) -> None:
    batch = batch_of()
    expected = [micro.inputs["input_ids"].tolist() for micro in regroup(batch, 64)]
    mask = batch["attention_mask"].to(dtype)
    assert [m.inputs["input_ids"].tolist() for m in regroup(batch | {"attention_mask": mask}, 64)] == expected
    mask[3, 2] = 0.5
    with pytest.raises(PadlessError, match=r"attention_mask holds 0\.5 at row 3, column 2"):
        regroup(batch | {"attention_mask": mask}, 64)
    mask[3, 2] = float("nan")
    with pytest.raises(PadlessError, match="attention_mask holds nan at row 3, column 2"):
        regroup(batch | {"attention_mask": mask}, 64)


def test_a_role_that_is_no_field_shows_one_that_is() -> None:
    batch = batch_of(weights=torch.ones(16, 12))
    with pytest.raises(PadlessError, match=r"fields\['weights'\] is 'row'.*Field\(span='row'\)"):
        regroup(batch, 64, fields={"weights": "row"})  # type: ignore[dict-item]
    with pytest.raises(PadlessError, match=r"fields is a list; expected a mapping"):
        regroup(batch, 64, fields=["weights"])  # type: ignore[arg-type]
    with pytest.raises(PadlessError, match=r"fields\['weights'\] is {'span': 'sequence'}"):
        flatten([{"input_ids": [1, 2], "weights": [0, 1]}], fields={"weights": {"span": "sequence"}})  # type: ignore[dict-item]
    assert regroup(batch, 64, fields={"weights": Field(span="sequence")})


def test_a_typo_in_fields_is_found_and_keys_that_a_batch_may_lack_are_not_typos() -> None:
    batch = batch_of(labels=torch.ones(16, 12))
    with pytest.raises(PadlessError, match=r"fields names 'lables', which is not in the batch; it has 'labels'"):
        regroup(batch, 64, fields={"lables": Field(pad=-1)})
    with pytest.raises(PadlessError, match=r"fields names 'position_id', .*it has '(inner\.)?position_ids'"):
        regroup(batch | {"inner": {"position_ids": torch.ones(16, 12)}}, 64, fields={"position_id": MROPE})
    for fields in (rlhf(), preference(), seq2seq(), vision(images="pictures", patches="tiles"), {"weights": Field()}):
        assert regroup(batch_of(), 64, fields=fields)


def test_token_ids_given_row_by_row_are_integers() -> None:
    with pytest.raises(PadlessError, match="'input_ids' holds fractions"):
        regroup([[1.0, 2.0], [3.0]], 8)
    assert flatten([[], []]).inputs["input_ids"].numel() == 0


class Exact:
    best = "packed-position-ids"

    def allows(self, layout: str) -> bool:
        return True

    def explain(self, layout: str | None = None) -> str:
        return ""


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing has been warned of yet."""
    monkeypatch.setattr(layouts, "_warned", False)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("layout", ["packed", "packed-block-mask-bool"])
def test_rows_packed_for_a_model_that_nobody_has_checked_are_warned_of_once(layout: str) -> None:
    with pytest.warns(UserWarning, match=r"check_layouts\(model\), or unsafe=True") as seen:
        regroup(batch_of(), 64, layout=layout)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regroup(batch_of(), 64, layout=layout)


@pytest.mark.usefixtures("forgetful")
def test_a_report_or_unsafe_says_enough_and_so_does_a_check_of_the_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regroup(batch_of(), 64)
        regroup(batch_of(), 64, layout="packed", unsafe=True)
        regroup(batch_of(), 64, layout="packed", report=Exact())
        regroup(batch_of(), 64, layout="auto", report=Exact())
        check_step(build_small("qwen2"), batch_of(4, 6), token_budget=16, layout="packed-position-ids")


def test_a_process_that_turns_warnings_into_errors_stops_at_unverified_packing() -> None:
    code = (
        "import padless\n"
        "rows = [[1, 2], [3]]\n"
        "padless.regroup(rows, 8, layout='packed', unsafe=True)\n"
        "print('reached')\n"
        "padless.regroup(rows, 8, layout='packed')\n"
    )
    run = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.stdout == "reached\n"
    assert done.returncode == 1
    assert "UserWarning: layout='packed' without report=" in done.stderr
