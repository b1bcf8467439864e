"""Write src/padless/bench/quantiles.json: the length distributions of the built-in workloads.

Run once, where the measured lengths are: ``python benchmarks/policy_update/make_quantiles.py LENGTHS.npz``.
The file holds ``NAME.prompt_lengths`` and ``NAME.response_lengths``, token counts of the same rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[2] / "src/padless/bench/quantiles.json"
# Denser at the top, where quantiles rise steeply and a straight line between two would lie above them.
LEVELS = [i / 40 for i in range(32)] + [0.8 + i / 100 for i in range(20)] + [0.995, 0.999, 1.0]
LEVELS = [round(level, 4) for level in LEVELS]
GROUPS = 8  # responses are given apart for each eighth of the prompts, so that their dependence is kept

COMMON = "counted with the Qwen tokenizer"
SOURCES = {
    "gsm8k-rl": (
        "mix_rl_gsm8k_heavy",
        4096,
        8192,
        "4,030 generations for reasoning prompts, mostly grade-school mathematics (GSM8K) with a long tail, "
        + COMMON
        + "; maxima are those of the published measurement (prompts <= 4k, responses <= 8k)",
    ),
    "longcot-rl": (
        "mix_rl_longcot",
        2048,
        16384,
        "3,441 generations with long chains of thought, 8 % of them cut at 16,384 tokens, " + COMMON,
    ),
    "sft-mix": (
        "mix_sft_general",
        6144,
        12288,
        "16,594 rows of general instruction tuning (short answers, chat, code, documents), " + COMMON,
    ),
}


def table(prompts: np.ndarray, responses: np.ndarray) -> dict[str, object]:
    order = np.argsort(prompts, kind="stable")
    parts = np.array_split(responses[order], GROUPS)
    return {
        "prompt": np.quantile(prompts, LEVELS).round().astype(int).tolist(),
        "response": [np.quantile(part, LEVELS).round().astype(int).tolist() for part in parts],
    }


def main() -> None:
    stored = np.load(sys.argv[1])
    workloads = {}
    for name, (measured, prompt_max, response_max, source) in SOURCES.items():
        prompts, responses = stored[f"{measured}.prompt_lengths"], stored[f"{measured}.response_lengths"]
        workloads[name] = {
            "source": source,
            "prompt_max": prompt_max,
            "response_max": response_max,
            **table(np.maximum(prompts, 1), np.maximum(responses, 1)),
        }
    lines = [json.dumps({name: value})[1:-1] for name, value in workloads.items()]
    TARGET.write_text(
        '{"levels": ' + json.dumps(LEVELS) + ',\n"workloads": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
