"""The policy-update benchmark at real sizes on one CUDA GPU, in bfloat16, within a fixed time.

    python benchmarks/gpu/run_gpu.py --out gpu.json            # about 8 minutes at most
    python benchmarks/gpu/run_gpu.py --dry-run --out dry.json  # tiny sizes on the CPU, to check the script itself

Runs the plans below in order, each in a process of its own, so that one that fails or hangs takes nothing with it.
A plan is started only if the time it needs is left; what is left out is said. Results so far are written after each.
Exit code 0 when at least one plan gave a result, otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ARMS = "fixed,truncate,greedy,balanced,packed"


@dataclass(frozen=True)
class Plan:
    """One call of ``padless bench``.

    Attributes:
        name: in the table.
        needs: seconds it should take at most; not started with less left.
        arguments: of the command.
    """

    name: str
    needs: float
    arguments: tuple[str, ...]


def has_mamba_kernels() -> bool:
    """Whether Jamba's Mamba layers run on kernels here."""
    return find_spec("mamba_ssm") is not None and find_spec("causal_conv1d") is not None


def jamba(*, width: int, inner: int, layers: int, heads: int, period: int, experts: int) -> dict[str, object]:
    """A Jamba config."""
    return {
        "model_type": "jamba",
        "vocab_size": 65536,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "attn_layer_period": period,
        "attn_layer_offset": period // 2,
        "num_experts": experts,
        "num_experts_per_tok": min(2, experts),
        "max_position_embeddings": 32768,
    }


def real_plans(folder: Path) -> list[Plan]:
    """Prompts up to 4k and responses up to 8k, as published; the workload's lengths at full scale."""
    common = [
        "--arms",
        ARMS,
        *["--device", "cuda", "--dtype", "bfloat16", "--checkpointing", "--no-masks", "--scale", "1"],
    ]
    small = ["--sequences", "32", "--rows", "2", "--token-budget", "24576", "--repeats", "2"]
    large = ["--sequences", "16", "--rows", "1", "--token-budget", "16384", "--repeats", "1"]
    config = folder / "hybrid.json"
    if has_mamba_kernels():
        # The proportions of a 3B Jamba: attention in two of 28 layers, no experts.
        hybrid = jamba(width=2560, inner=8192, layers=28, heads=20, period=14, experts=1)
        needs, sizes, name = 150.0, small, "hybrid (Jamba, 3B proportions, mamba_ssm)"
    else:
        # torch's own operations: every layer materialises its states, so the model is small and the rows are few.
        hybrid = jamba(width=512, inner=1408, layers=8, heads=8, period=8, experts=4)
        needs, sizes, name = 120.0, large, "hybrid (Jamba, width 512, torch operations)"
    config.write_text(json.dumps(hybrid))
    return [
        Plan("Qwen2.5-1.5B", 140.0, ("--model", "qwen2.5-1.5b", *common, *small)),
        Plan("Qwen2.5-7B", 170.0, ("--model", "qwen2.5-7b", *common, *large)),
        Plan(name, needs, ("--model", str(config), *common, *sizes)),
    ]


def dry_plans(folder: Path) -> list[Plan]:
    """The same calls with tiny models on the CPU."""
    sizes = [
        "--scale",
        "0.01",
        "--sequences",
        "4",
        "--rows",
        "2",
        "--repeats",
        "1",
        "--no-masks",
        "--dtype",
        "bfloat16",
        "--checkpointing",
    ]
    common = ["--arms", ARMS, *sizes]
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    plans = []
    for name, extra in (
        ("qwen2", {"num_hidden_layers": 2}),
        ("jamba", {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, "vocab_size": 128, **tiny, **extra}))
        plans.append(Plan(f"{name} (dry run)", 5.0, ("--model", str(path), *common)))
    return plans


def execute(plan: Plan, deadline: float) -> dict[str, object]:
    """Run one plan in its own process; its report, or what went wrong."""
    left = deadline - time.monotonic()
    if left < plan.needs:
        return {"name": plan.name, "skipped": f"{left:.0f} s left, {plan.needs:.0f} s needed"}
    command = [sys.executable, "-m", "padless", "bench", *plan.arguments, "--json", "-"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"name": plan.name, "failed": f"stopped after {left:.0f} s"}
    told: dict[str, object] = {"name": plan.name, "seconds": time.monotonic() - began}
    try:
        return {**told, "report": json.loads(done.stdout)}
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {**told, "failed": f"exit code {done.returncode}: {last}"}


def table(results: list[dict[str, object]]) -> str:
    """One table of all plans, for people."""
    head = ("step s", 8), ("vs fixed", 9), ("/ packed", 9), ("recovered", 10), ("occupancy", 10), ("real tok/s", 11)
    titles = " ".join(f"{title:>{width}}" for title, width in (*head, ("peak GiB", 9)))
    lines = [f"{'model':44} {'arm':9} {titles}"]
    for result in results:
        name = str(result["name"])
        if "report" not in result:
            lines.append(f"{name:44} {result.get('failed') or 'not started: ' + str(result.get('skipped'))}")
            continue
        for model in result["report"]["models"].values():  # type: ignore[index]
            for arm, told in model["arms"].items():
                fixed, packed = model["ratio_to_fixed"].get(arm), model["ratio_to_packed"].get(arm)
                gain = model["gain_recovered"].get(arm)
                memory = told["peak_memory_bytes"]
                lines.append(
                    f"{name:44} {arm + ('' if told['valid'] else '*'):9} {told['seconds']:8.2f}"
                    f" {'-' if not fixed else format(1 / fixed, '8.1f') + 'x':>9}"
                    f" {'-' if not packed else format(packed, '.2f'):>9}"
                    f" {'-' if gain is None else format(gain, '.1%'):>10} {told['occupancy']:10.1%}"
                    f" {told['real_tokens_per_second']:11,.0f}"
                    f" {'-' if memory is None else format(memory / 2**30, '.1f'):>9}"
                )
                name = ""
    lines.append("* timing only: the model's outputs change when it is run this way")
    return "\n".join(lines)


def main() -> int:
    """Run all plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes - 10
    given.out.parent.mkdir(parents=True, exist_ok=True)
    plans = (dry_plans if given.dry_run else real_plans)(given.out.parent)
    results: list[dict[str, object]] = []
    for plan in plans:
        print(f"{plan.name}: {max(0, deadline - time.monotonic()):.0f} s left", file=sys.stderr, flush=True)
        results.append(execute(plan, deadline))
        given.out.write_text(json.dumps({"dry_run": given.dry_run, "results": results}, indent=1) + "\n")
    print(table(results))
    print(f"JSON: {given.out}")
    return 0 if any("report" in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
