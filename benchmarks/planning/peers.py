"""The planners of other libraries, each called as its installed package ships it.

A peer is found in the environment or in the folders of ``--peers`` (each may hold packages itself or in
sub-folders, as ``pip install --no-deps --target FOLDER/NAME NAME`` leaves them). Where a package imports what
its planner does not use, only the planner's own file is executed, unmodified, with stand-ins for those imports.

Every adapter separates what is timed from what is not: ``prepare`` turns lengths into what the peer takes (lists,
tables, examples) and returns a call to time, and a function that reads its result.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Batcher", "Packer", "Peers", "find"]

#: Peers that no package on the index brings in a form that runs, and why.
UNAVAILABLE = {
    "nemo-rl": "its package (0.0.0) is a placeholder without the packing code",
    "histogram packing (Krell et al.)": "no package on the index carries its code, optimum-graphcore included",
    "seqpacker": "no wheel for this Python; its source needs crates to build",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Sequences into rows: ``prepare(lengths, capacity)`` returns the call to time and result -> number of packs."""

    name: str
    version: str
    prepare: Callable[[np.ndarray, int], tuple[Callable[[], Any], Callable[[Any], int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """One optimizer step into micro-batches: ``prepare(lengths, budget, ranks)``.

    Returns the call to time and a function from its result to the groups, as lengths: group g runs in micro-step
    ``g // ranks`` on rank ``g % ranks``.
    """

    name: str
    version: str
    prepare: Callable[[np.ndarray, int, int], tuple[Callable[[], Any], Callable[[Any], list[np.ndarray]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What was found, and why the rest was not."""

    packers: dict[str, Packer]
    batchers: dict[str, Batcher]
    missing: dict[str, str]

    @property
    def versions(self) -> dict[str, str]:
        return {peer.name: peer.version for peer in (*self.packers.values(), *self.batchers.values())}


def find(folders: Sequence[str]) -> Peers:
    """Load every peer that can be had and try it once on a small input."""
    roots = _roots(folders)
    packers: dict[str, Packer] = {}
    batchers: dict[str, Batcher] = {}
    missing = dict(UNAVAILABLE)
    for name, make in PACKERS.items():
        with _reported(name, missing):
            packer = make(roots)
            call, packs = packer.prepare(np.array([3, 4, 5, 6]), 10)
            if packs(call()) not in (2, 3):
                raise RuntimeError("packed four lengths wrongly")
            packers[name] = packer
    for name, make_batcher in BATCHERS.items():
        with _reported(name, missing):
            batcher = make_batcher(roots)
            lengths = np.arange(20, 60)
            run, groups = batcher.prepare(lengths, 400, 2)
            if sorted(np.concatenate(groups(run())).tolist()) != lengths.tolist():
                raise RuntimeError("lost or repeated sequences")
            batchers[name] = batcher
    return Peers(packers=packers, batchers=batchers, missing=missing)


@contextmanager
def _reported(name: str, missing: dict[str, str]) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # a peer may fail in any way; it is named with the reason
        missing[name] = f"{type(error).__name__}: {error}"[:200]


def _roots(folders: Sequence[str]) -> list[Path]:
    """Folders to look for packages in; sub-folders that hold installed packages count, and all are importable."""
    roots: list[Path] = []
    for folder in map(Path, folders):
        found = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.dist-info")))]
        roots += [path.resolve() for path in found]
    site = Path(np.__file__).parent.parent  # the environment's own packages come first
    return [site, *roots]


def _home(roots: list[Path], file: str) -> Path:
    for root in roots:
        if (root / file).is_file():
            return root
    raise ModuleNotFoundError(f"no {file} in the environment or in --peers")


def _version(root: Path, package: str) -> str:
    for path in root.glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name.replace("-", "_").lower() == package:
            return version
    return "unknown"


def _execute(roots: list[Path], file: str, stand_ins: dict[str, dict[str, Any]] | None = None) -> tuple[Any, Path]:
    """Run one file of a package as a module. ``stand_ins``: modules it imports but its planner does not use."""
    root = _home(roots, file)
    name = file.split(".")[0].replace("/", ".")  # a compiled file's name holds its platform too
    added = _stand_in(stand_ins or {})
    try:
        spec = importlib.util.spec_from_file_location(name, root / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        added.append(name)
        spec.loader.exec_module(module)
    finally:
        for entry in added:
            sys.modules.pop(entry, None)
    return module, root


def _stand_in(modules: dict[str, dict[str, Any]]) -> list[str]:
    """Put empty modules with the given names (and their parents) in place; returns what was added."""
    added = []
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = types.ModuleType(path)
                added.append(path)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[name]).update(contents)
    return added


def _importable(roots: list[Path], file: str) -> Path:
    root = _home(roots, file)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return root


# Packs


def _trl(roots: list[Path]) -> Packer:
    import pyarrow as pa

    data_utils = importlib.import_module("trl.data_utils")

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)  # one table; a token is one byte
        tokens = pa.array(np.zeros(int(lengths.sum()), dtype=np.int8))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), tokens)})
        return (lambda: data_utils._pack_bfd(table, capacity)), len

    return Packer(name="trl bfd", version=importlib.metadata.version("trl"), prepare=prepare)


def _axolotl(roots: list[Path]) -> Packer:
    module, root = _execute(
        roots,
        "axolotl/utils/samplers/multipack.py",
        {
            "axolotl.utils.distributed": {"reduce_and_broadcast": None},
            "axolotl.utils.logging": {"get_logger": logging.getLogger},
        },
    )

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        array = lengths.astype(np.int32)  # its sampler's own type, group size, bin size and mode

        def run() -> Any:
            return module.pack_parallel(array, capacity, 100_000, 200, num_processes=1, safe_mode=True)

        return run, len

    return Packer(name="axolotl multipack", version=_version(root, "axolotl"), prepare=prepare)


def _llama_factory(blocks: int | None) -> Callable[[list[Path]], Packer]:
    def make(roots: list[Path]) -> Packer:
        module, root = _execute(roots, "llamafactory/data/processor/processor_utils.py")

        def prepare(lengths: np.ndarray, capacity: int) -> Any:
            size = blocks or len(lengths)
            parts = [lengths[start : start + size].tolist() for start in range(0, len(lengths), size)]

            def run() -> int:
                return sum(len(module.greedy_knapsack(list(part), capacity)) for part in parts)

            return run, int

        name = "llama-factory knapsack" + (f", blocks of {blocks}" if blocks else "")
        return Packer(name=name, version=_version(root, "llamafactory"), prepare=prepare)

    return make


def _megatron_bridge(roots: list[Path]) -> Packer:
    module, root = _execute(
        roots,
        "megatron/bridge/data/packing/algorithms.py",
        {"megatron.bridge.utils.safe_pickle": {"safe_load_npy": None}},
    )
    return _histogram_packer(module, "megatron-bridge ffd", _version(root, "megatron_bridge"))


def _nemo(roots: list[Path]) -> Packer:
    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.ERROR)
    module, root = _execute(roots, "nemo/utils/sequence_packing_utils.py", {"nemo.utils": {"logging": quiet}})
    return _histogram_packer(module, "nemo ffd", _version(root, "nemo_toolkit"))


def _histogram_packer(module: Any, name: str, version: str) -> Packer:
    """Both take a histogram (not timed) and give the lengths of each pack, without the sequences' indices."""

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        histogram = np.bincount(lengths, minlength=capacity + 1).tolist()
        return (lambda: module.create_packing_strategy(histogram, capacity, "first_fit_decreasing")[0]), len

    return Packer(name=name, version=version, prepare=prepare)


def _grain(roots: list[Path]) -> Packer:
    root = _importable(roots, "grain/experimental.py")
    logging.getLogger("absl").setLevel(logging.ERROR)
    grain = importlib.import_module("grain")

    class Source:
        """Examples of one byte a token, made when asked for."""

        def __init__(self, lengths: np.ndarray) -> None:
            self.lengths, self.tokens = lengths, np.zeros(int(lengths.max()), dtype=np.int8)

        def __len__(self) -> int:
            return len(self.lengths)

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"tokens": self.tokens[: self.lengths[index]]}

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        data = grain.MapDataset.source(Source(lengths)).to_iter_dataset(grain.ReadOptions(num_threads=0))
        packed = grain.experimental.BestFitPackIterDataset(
            data, length_struct={"tokens": capacity}, num_packing_bins=64, shuffle_bins=False
        )
        return (lambda: sum(1 for _ in packed)), int

    return Packer(name="grain best-fit, 64 bins", version=_version(root, "grain"), prepare=prepare)


def _ms_swift(roots: list[Path]) -> Packer:
    _importable(roots, "binpacking/__init__.py")
    module, root = _execute(
        roots,
        "swift/dataset/packing.py",
        {
            "swift.template": {"MaxLengthError": ValueError},
            "swift.utils": dict.fromkeys(
                ("get_external_files", "import_external_file", "is_dist", "is_master", "split_list")
            )
            | {"get_logger": logging.getLogger},
        },
    )

    class Queue:
        def __init__(self) -> None:
            self.packs = 0

        def put(self, item: tuple[int, list[Any], int]) -> None:
            self.packs += len(item[1])

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        values = lengths.tolist()

        def run() -> int:  # its worker, in blocks of 1,000 rows
            queue = Queue()
            module.PackingDataset.create_packed_idx(0, 0, values, queue, capacity, "binpack")
            return queue.packs

        return run, int

    return Packer(name="ms-swift, blocks of 1000", version=_version(root, "ms_swift"), prepare=prepare)


def _lightbinpack(roots: list[Path]) -> Packer:
    root = _importable(roots, "lightbinpack/__init__.py")
    module = importlib.import_module("lightbinpack")

    def prepare(lengths: np.ndarray, capacity: int) -> Any:
        values = lengths.tolist()
        return (lambda: module.obfd(values, capacity)), len  # its fastest that is best-fit-decreasing

    return Packer(name="lightbinpack obfd", version=_version(root, "lightbinpack"), prepare=prepare)


# Micro-batches


def _verl(roots: list[Path]) -> Batcher:
    planner, version = verl_planner(roots)

    def prepare(lengths: np.ndarray, budget: int, ranks: int) -> Any:
        values = lengths.tolist()

        def run() -> list[list[int]]:
            """Deal the sequences over the ranks, then split each rank's; ranks agree on the larger count."""
            if ranks == 1:
                shares = [list(range(len(values)))]
            else:
                work = [24_576 * n + n * n for n in values]  # its trainer's calculate_workload
                shares = planner.get_seqlen_balanced_partitions(work, ranks, equal_size=True)
            count, plans = 1, [planner([values[i] for i in share], budget) for share in shares]
            while len({len(plan) for plan in plans}) > 1:
                count = max(map(len, plans))
                plans = [
                    plan if len(plan) == count else planner([values[i] for i in share], budget, count)
                    for plan, share in zip(plans, shares, strict=True)
                ]
            pairs = [list(zip(shares, step, strict=True)) for step in zip(*plans, strict=True)]
            return [[share[i] for i in group] for step in pairs for share, group in step]

        return run, lambda found: [lengths[group] for group in found]

    return Batcher(name="verl", version=version, prepare=prepare)


class VerlPlanner:
    """``rearrange_micro_batches`` on lengths: index lists for one rank. No tensor is cut; that is a stand-in."""

    def __init__(self, module: Any) -> None:
        self.rearrange = module.rearrange_micro_batches
        self.get_seqlen_balanced_partitions = module.get_seqlen_balanced_partitions

    def __call__(self, lengths: list[int], budget: int, at_least: int | None = None) -> list[list[int]]:
        batch = {"input_ids": _Jagged(lengths)}
        found: list[list[int]] = self.rearrange(batch, budget, min_num_micro_batch=at_least)[1]
        return found


class _Jagged:
    """A jagged tensor as far as the planner looks at it: its offsets."""

    is_nested = True

    def __init__(self, lengths: list[int]) -> None:
        import torch

        self._offsets = torch.tensor([0, *lengths]).cumsum(0)

    def offsets(self) -> Any:
        return self._offsets


def verl_planner(roots: list[Path]) -> tuple[VerlPlanner, str]:
    module, root = _execute(
        roots,
        "verl/utils/seqlen_balancing.py",
        {
            "verl.protocol": {"DataProto": None},
            "verl.utils.tensordict_utils": {"index_select_tensor_dict": lambda batch, rows: rows},
            "verl.utils.device": {"get_device_name": lambda: "cpu"},
        },
    )
    return VerlPlanner(module), _version(root, "verl")


def _batch_rebalance(roots: list[Path]) -> Batcher:
    sampler = importlib.import_module("transformers.trainer_pt_utils").BatchRebalanceSampler

    def prepare(lengths: np.ndarray, budget: int, ranks: int) -> Any:
        """It knows no budget: the fewest accumulation steps that keep within it are searched for, untimed."""
        values, indices = lengths.tolist(), list(range(len(lengths)))

        def plan(steps: int) -> Any:
            made = sampler(values, len(values), ranks, steps, shuffle=False)
            return made._assign(indices, values)  # [rank][step]: what every rank computes once per optimizer step

        def groups(found: Any) -> list[np.ndarray]:
            return [lengths[rank[step]] for step in range(len(found[0])) for rank in found]

        steps = -(-int(lengths.sum()) // (ranks * budget))
        while (most := max(len(g) * int(g.max()) for g in groups(plan(steps)))) > budget:
            steps = max(steps + 1, int(steps * min(1.2, most / budget)))
            if steps * ranks > len(values):
                raise RuntimeError("no number of accumulation steps keeps within the budget")
        return (lambda: plan(steps)), groups

    version = importlib.metadata.version("transformers")
    return Batcher(name="transformers batch_rebalance", version=version, prepare=prepare)


def _group_by_length(roots: list[Path]) -> Batcher:
    import torch

    sampler = importlib.import_module("transformers.trainer_pt_utils").LengthGroupedSampler

    def prepare(lengths: np.ndarray, budget: int, ranks: int) -> Any:
        """It knows no budget: the most rows per micro-batch that keep within it are searched for, untimed."""
        values = lengths.tolist()

        def plan(rows: int) -> list[int]:
            return list(sampler(rows, lengths=values, generator=torch.Generator().manual_seed(0)))

        def cut(order: list[int], rows: int) -> list[np.ndarray]:
            ordered = lengths[order]
            return [ordered[start : start + rows] for start in range(0, len(ordered), rows)]

        rows, best = 1, 1
        while rows <= -(-len(values) // ranks) and rows <= budget:
            if max(len(g) * int(g.max()) for g in cut(plan(rows), rows)) <= budget:
                best = rows
            elif rows > 2 * best:
                break
            rows += max(1, rows // 8)
        return (lambda: plan(best)), (lambda order: cut(order, best))

    version = importlib.metadata.version("transformers")
    return Batcher(name="transformers group_by_length", version=version, prepare=prepare)


def _fairseq(roots: list[Path]) -> Batcher:
    folder = "fairseq/data"
    root = _home(roots, f"{folder}/data_utils.py")
    built = next((root / folder).glob("data_utils_fast*.so"), None)
    if built is None:
        raise ModuleNotFoundError("fairseq is there without its compiled data_utils_fast")
    fast, _ = _execute([root], f"{folder}/{built.name}")
    stand_ins = {"fairseq.file_io": {"PathManager": None}, "fairseq.utils": {}}
    module, _ = _execute([root], f"{folder}/data_utils.py", stand_ins)

    def prepare(lengths: np.ndarray, budget: int, ranks: int) -> Any:
        sizes = lengths.astype(np.int64)

        def run() -> Any:  # the order of its datasets, then its batches; rank r takes every ranks-th
            order = np.argsort(sizes, kind="mergesort")
            return module.batch_by_size(order, None, num_tokens_vec=sizes[order], max_tokens=budget)

        return run, lambda found: [lengths[group] for group in found]

    _stand_in({"fairseq.data.data_utils_fast": vars(fast)})  # imported when it is called
    return Batcher(name="fairseq", version=_version(root, "fairseq"), prepare=prepare)


def _lhotse(roots: list[Path]) -> Batcher:
    root = _importable(roots, "lhotse/__init__.py")
    sampling = importlib.import_module("lhotse.dataset.sampling")
    constraint = importlib.import_module("lhotse.dataset.sampling.base").TokenConstraint
    example = importlib.import_module("lhotse.cut.text").TextExample

    def prepare(lengths: np.ndarray, budget: int, ranks: int) -> Any:
        tokens = np.zeros(int(lengths.max()), dtype=np.int8)
        data = [example(text="", tokens=tokens[:n]) for n in lengths.tolist()]

        def run() -> list[Any]:
            sampler = sampling.DynamicBucketingSampler(
                data, constraint=constraint(max_tokens=budget), num_buckets=10, world_size=ranks, rank=0
            )
            iter(sampler)
            return list(sampler.cuts_iter)  # the batches of all ranks, in the order they are dealt

        return run, lambda found: [np.array([len(one.tokens) for one in batch]) for batch in found]

    return Batcher(name="lhotse dynamic bucketing", version=_version(root, "lhotse"), prepare=prepare)


PACKERS: dict[str, Callable[[list[Path]], Packer]] = {
    "trl bfd": _trl,
    "axolotl multipack": _axolotl,
    "llama-factory knapsack": _llama_factory(None),
    "llama-factory knapsack, blocks of 1000": _llama_factory(1000),
    "megatron-bridge ffd": _megatron_bridge,
    "nemo ffd": _nemo,
    "grain best-fit, 64 bins": _grain,
    "ms-swift, blocks of 1000": _ms_swift,
    "lightbinpack obfd": _lightbinpack,
}
BATCHERS: dict[str, Callable[[list[Path]], Batcher]] = {
    "verl": _verl,
    "transformers batch_rebalance": _batch_rebalance,
    "transformers group_by_length": _group_by_length,
    "fairseq": _fairseq,
    "lhotse dynamic bucketing": _lhotse,
}
