"""Write docs/models.md: the verdict of every causal language model of the installed transformers, in each layout.

    python scripts/models_table.py                     # all of them; an hour or less on one core
    python scripts/models_table.py --only qwen2 jamba  # these again, the rest as it was
    python scripts/models_table.py --dtype bfloat16    # then the same models in half precision, beside the first
    python scripts/models_table.py --render            # the page from docs/models.json, nothing measured
    python scripts/models_table.py --part 0/4 --data /tmp/part0.json   # a quarter, to run four side by side

Each architecture is built small with random weights by `padless.verify.build_small`, judged by `check_layouts`, and
compared with a slow float64 reference. In bfloat16 it is built and judged again; the reference is the same one, because
which tokens may influence which is a matter of the architecture, not of the precision. What was measured is kept in
docs/models.json, one line for each architecture, and a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
LAYOUTS = (
    "right-padded",
    "right-padded-no-mask",
    "left-padded",
    "packed-position-ids",
    "packed-cu-seqlens",
    "packed-seq-idx",
    "packed-block-mask-additive",
    "packed-block-mask-bool",
)
LIMIT_SECONDS = 400
HALF = ("bfloat16",)


def measure(model_type: str) -> dict[str, Any]:
    """One architecture: verdicts and the reference's opinion, or why there are none."""
    from padless.verify import build_small, check_layouts
    from padless.verify.reference import reference_verdicts

    started = time.process_time()
    try:
        model = build_small(model_type)
    except TimeoutError:
        raise
    except Exception as error:
        return {"not_built": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    built = time.process_time()
    row: dict[str, Any] = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        report = check_layouts(model, layouts=LAYOUTS, seeds=(0,), cache=False)
    except TimeoutError:
        raise
    except Exception as error:
        return {**row, "not_run": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    row["cpu_seconds"] = round(time.process_time() - built, 1)
    row["attention"] = report.environment["attention"]
    row["verdicts"] = {name: result.verdict for name, result in report.layouts.items()}
    row["difference"] = {n: r.difference and float(f"{r.difference:.1e}") for n, r in report.layouts.items()}
    row["causes"] = {name: result.cause for name, result in report.layouts.items() if result.cause}
    row["why"] = {name: result.why for name, result in report.layouts.items() if result.why}
    try:
        found = reference_verdicts(model, LAYOUTS)
        row["reference"] = {n: r.raised or float(f"{r.difference or 0.0:.1e}") for n, r in found.items()}
        row["reference_exact"] = [name for name, reference in found.items() if reference.exact]
    except TimeoutError:
        raise
    except Exception as error:
        row["reference_failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    row["total_cpu_seconds"] = round(time.process_time() - started, 1)
    return row


def measure_half(model_type: str, dtype: str, single: dict[str, str]) -> dict[str, Any]:
    """Verdicts of one architecture in half precision, at its default initialisation, and why others than ``single``."""
    from padless.verify import build_small, check_layouts

    try:
        model = build_small(model_type, dtype=dtype)
        started = time.process_time()
        report = check_layouts(model, layouts=LAYOUTS, seeds=(0,), cache=False)
    except TimeoutError:
        raise
    except Exception as error:
        return {"not_run": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {
        "cpu_seconds": round(time.process_time() - started, 1),
        "verdicts": {name: result.verdict for name, result in report.layouts.items()},
        "why": {n: r.why for n, r in report.layouts.items() if r.verdict != single.get(n)},
    }


def sweep(types: list[str], known: dict[str, Any], path: Path, dtype: str) -> None:
    """Measure ``types`` into ``known``, saved after each."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"over {LIMIT_SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    for number, model_type in enumerate(types, 1):
        signal.alarm(LIMIT_SECONDS)
        try:
            row = (
                measure(model_type)
                if dtype == "float32"
                else measure_half(model_type, dtype, known[model_type]["verdicts"])
            )
        except TimeoutError as error:
            row = {"not_run": str(error)}
        finally:
            signal.alarm(0)
        if dtype == "float32":
            known[model_type] = {
                **row,
                **{key: known[model_type][key] for key in HALF if key in known.get(model_type, {})},
            }
        else:
            known[model_type][dtype] = row
        save(known, path)
        gc.collect()  # graphs of the last model, before the next one is built
        print(f"{number}/{len(types)} {model_type}", row.get("verdicts") or row, flush=True)


def due(types: list[str], known: dict[str, Any], dtype: str) -> list[str]:
    """Architectures that are not measured yet; in half precision, those that could be measured in single."""
    if dtype == "float32":
        return [name for name in types if name not in known]
    return [name for name in types if "verdicts" in known.get(name, {}) and dtype not in known[name]]


def save(known: dict[str, Any], path: Path) -> None:
    """One line for each architecture, so that a change shows as one line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="measure these again")
    parser.add_argument("--again", action="store_true", help="forget what is known and measure all")
    parser.add_argument("--render", action="store_true", help="write the page only")
    parser.add_argument("--dtype", choices=("float32", *HALF), default="float32", help="of the models")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every Nth architecture, from the Ith")
    parser.add_argument("--data", type=Path, default=DATA, help="where measurements are kept")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="add the measurements of these files first")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    from padless.verify import causal_lm_types

    types = causal_lm_types()
    known: dict[str, Any] = {}
    for path in (options.data, *options.merge):
        if path.exists() and not options.again:
            known.update(json.loads(path.read_text(encoding="utf-8")))
    if not options.render:
        import torch
        import transformers

        warnings.filterwarnings("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        known = {name: row for name, row in known.items() if name in types or name == "_versions"}
        known["_versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        first, parts = (int(number) for number in options.part.split("/"))
        chosen = options.only or due(types[first::parts], known, options.dtype)
        print(f"{len(chosen)} to measure in {options.dtype}", flush=True)
        sweep(chosen, known, options.data, options.dtype)
    save(known, options.data)
    if options.data == DATA:
        from models_page import page

        PAGE.write_text(page(known, types), encoding="utf-8")


if __name__ == "__main__":
    main()
