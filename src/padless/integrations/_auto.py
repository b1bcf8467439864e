"""``token_budget="auto"``: the profile at hand, or a search on the live model by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from padless.errors import PadlessError
from padless.exchange import agree
from padless.integrations._options import PadlessOptions
from padless.lengths import positive_int
from padless.tensors.fields import Field, field_for
from padless.tuning import Profile, Trial, load_profile, memory_limit_of, profile_path, tune

__all__ = ["auto_profile", "bytes_of", "longest_in", "trial_batch", "unwrapped"]

CALIBRATE_SECONDS = 10.0
_MASK = "attention_mask"
_log = logging.getLogger("padless")

WAYS_OUT = (
    "give token_budget a number, or run `padless tune` and let PadlessOptions(profile=...) or $PADLESS_PROFILE name"
    " what it wrote"
)


def auto_profile(
    options: PadlessOptions,
    model: nn.Module,
    *,
    step: Callable[[nn.Module, int, int], None],
    longest: Callable[[], int | None],
    rows_together: int = 1,
    optimizer: Any = None,
    also_held: int = 0,
    process_group: Any = None,
    writes: bool = True,
    check: bool = True,
) -> Profile:
    """Token budget and cost that hold on every rank: from their profiles, or found now and written.

    Every rank of the group calls it. Where each has a profile of this model the smallest budget counts. Where one has
    none, all search together: each trial must fit on every rank. Costs are those of the group's first rank.

    Args:
        options: ``profile``, ``memory_limit`` and ``max_length`` are read.
        model: the module that trains, without DDP around it; left as it was.
        step: forward and backward of one micro-batch (rows, width) on ``model``, as the host does it, without
            collectives.
        longest: the longest row of the data, or ``None`` where the data does not tell.
        rows_together: rows that always share a micro-batch (2 for pairs).
        optimizer: whose state needs room.
        also_held: bytes that stay in memory beside model and optimizer, for a stated limit.
        process_group: the ranks, or ``None``.
        writes: whether this process writes the file.
        check: refuse a profile of another model.

    Raises:
        PadlessError: on every rank, where one of them cannot search or has a profile of another model.
    """
    place = profile_path(options.profile)
    found, error = _read(place, model if check else None)
    missing = found is None and error is None
    if process_group is not None:
        told = agree(process_group, what="token_budget='auto'", options={}, error=error, numbers=[int(missing)])
        missing = bool(told[:, 0].any())
    elif error is not None:
        raise error
    if not missing:
        assert found is not None
        return _common(found, process_group)
    limit, most = _prepare(options, model, longest, place, process_group)
    _log.info("token_budget='auto': no profile at %s, searching with rows of up to %d tokens", place, most)
    with torch.compiler.set_stance("force_eager"):  # every trial has a shape of its own
        profile = tune(
            model,
            max_length=most,
            rows_together=rows_together,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # Accelerate wraps it
            step=step,
            memory_limit=limit,
            also_held=also_held,
            calibrate_seconds=CALIBRATE_SECONDS,
            process_group=process_group,
            on_trial=_say,
        )
    profile = _common(profile, process_group)
    if writes:
        try:
            profile.save(place)
        except PadlessError as error:  # no reason to end the training that it was found for
            _log.warning("token_budget='auto': %s; it is found again the next time", error)
        else:
            _log.info("token_budget='auto': %d padded tokens per micro-batch, kept in %s", profile.token_budget, place)
    return profile


def _read(place: Path, model: nn.Module | None) -> tuple[Profile | None, PadlessError | None]:
    if not place.exists():
        return None, None
    try:
        return load_profile(place, model=model), None
    except PadlessError as error:
        return None, error


def _prepare(
    options: PadlessOptions, model: nn.Module, longest: Callable[[], int | None], place: Path, group: Any
) -> tuple[int | None, int]:
    """This rank's memory limit and the longest row over all ranks; errors reach every rank."""
    limit: int | None = None
    most, error = 0, None
    try:
        device = next(model.parameters()).device
        if options.memory_limit is not None or device.type != "cuda":
            if options.memory_limit is None:
                raise PadlessError(
                    f"token_budget='auto': there is no profile at {place}, and a search on device {device.type!r} needs"
                    f" PadlessOptions(memory_limit='8GiB'): state one, {WAYS_OUT}"
                )
            limit = memory_limit_of(device, options.memory_limit)
        told = options.max_length or longest()
        if told is None:
            raise PadlessError(
                f"token_budget='auto': there is no profile at {place}, and the data does not tell its longest row: give"
                f" PadlessOptions(max_length=...), {WAYS_OUT}"
            )
        most = positive_int(told, name="max_length")
    except Exception as raised:
        error = raised
    if group is None:
        if error is not None:
            raise error
        return limit, most
    numbers = agree(group, what="token_budget='auto'", options={}, error=error, numbers=[most])
    return limit, int(numbers[:, 0].max())


def _common(profile: Profile, group: Any) -> Profile:
    """The smallest budget of the ranks, with the cost model of the first."""
    if group is None:
        return profile
    held: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(held, (profile.token_budget, profile.cost), group=group)
    return replace(profile, token_budget=min(budget for budget, _ in held), cost=held[0][1])


def _say(trial: Trial) -> None:
    verdict = f"{trial.peak / 2**20:,.0f} MiB" if trial.fits else "does not fit"
    _log.debug("token_budget='auto': %d rows x %d tokens: %s", trial.rows, trial.width, verdict)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP: trials run without collectives, so that a rank out of memory leaves nobody waiting."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def bytes_of(*modules: Any) -> int:
    """Bytes of the parameters and buffers of modules that are there."""
    tensors = [
        t for module in modules if isinstance(module, nn.Module) for t in (*module.parameters(), *module.buffers())
    ]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def longest_in(dataset: Any, columns: Iterable[tuple[str, ...]]) -> int | None:
    """The longest row of a data set: the most over ``columns``, each a tuple of columns that follow one another.

    Only what is cheap and exact is read: a ``datasets.Dataset``, or a list of mappings. ``None`` for anything else.

    >>> longest_in([{"a": [1, 2], "b": [3], "c": [4, 5]}], [("a", "b"), ("a", "c")])
    4
    """
    columns = list(columns)
    names = sorted({name for parts in columns for name in parts})
    if isinstance(dataset, list | tuple):
        if not dataset or any(name not in dataset[0] for name in names):
            return None
        return max(sum(len(row[name]) for name in parts) for row in dataset for parts in columns)
    if not set(names) <= set(getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "select_columns"):
        return None
    if not hasattr(dataset, "__len__") or not len(dataset):  # a stream
        return None
    import pyarrow.compute as pc

    most = 0
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=10_000):
        lengths = {name: pc.list_value_length(table[name]) for name in names}
        for parts in columns:
            total = lengths[parts[0]]
            for name in parts[1:]:
                total = pc.add(total, lengths[name])
            most = max(most, int(pc.max(total).as_py() or 0))
    return most or None


def trial_batch(batch: Mapping[str, Any], fields: Mapping[str, Field], rows: int, width: int) -> dict[str, Any]:
    """A batch of ``rows`` full rows of ``width`` tokens, made from the tokens of a real one.

    Masks are ones and every token has a label, so that no step of real rows needs more.

    >>> ids = torch.tensor([[5, 6, 0]])
    >>> made = trial_batch({"input_ids": ids, "attention_mask": (ids > 0).long()}, {}, 2, 3)
    >>> made["input_ids"].tolist(), made["attention_mask"].tolist()
    ([[5, 6, 5], [5, 6, 5]], [[1, 1, 1], [1, 1, 1]])
    """
    mask = batch[_MASK]  # (N, W)
    donor = int((mask > 0).sum(1).argmax())
    cells = (mask[donor] > 0).nonzero()[:, 0]
    return {key: _repeat(key, value, field_for(key, fields), donor, cells, rows, width) for key, value in batch.items()}


def _repeat(key: str, value: Any, role: Field | None, donor: int, cells: Tensor, rows: int, width: int) -> Any:
    if isinstance(value, list | tuple):
        return [value[at % len(value)] for at in range(rows)]
    if not isinstance(value, Tensor) or value.dim() == 0 or (role is not None and role.span == "batch"):
        return value
    if role is not None and role.span == "row":
        index = torch.arange(rows, device=value.device) % value.shape[role.batch_axis]
        return value.index_select(role.batch_axis, index)
    if role is None or role.span != "sequence":
        raise PadlessError(
            f"token_budget='auto' cannot make trial rows of {key!r} (shape {tuple(value.shape)}): {WAYS_OUT}"
        )
    axis = role.axis - (role.batch_axis < role.axis)
    row = value.select(role.batch_axis, donor).index_select(axis, cells)
    if "mask" in key:
        row = torch.ones_like(row)
    elif key == "labels":
        held = value[value != role.pad]
        row = held if len(held) and value.dim() == 2 else row
    index = torch.arange(width, device=value.device)
    if role.pad == "count":  # positions
        filled = index.reshape([-1 if at == axis else 1 for at in range(row.dim())]).expand(
            [width if at == axis else size for at, size in enumerate(row.shape)]
        )
    else:
        filled = row.index_select(axis, index % row.shape[axis])
    filled = filled.unsqueeze(role.batch_axis)
    shape = list(filled.shape)
    shape[role.batch_axis] = rows
    return filled.expand(shape).contiguous()
