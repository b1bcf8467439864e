"""Which layouts may my model be fed? Ask once, and let every step use the fastest exact one.

python examples/verify_model.py             # a small Jamba hybrid
python examples/verify_model.py qwen2       # any model type of transformers, built small with random weights
"""

import sys

import torch

import padless
from padless.verify import build_small, check_layouts, check_step

model = build_small(sys.argv[1] if len(sys.argv) > 1 else "jamba")

report = check_layouts(model)  # your own model here, as you train it; kept on disk for the second time
print(report.explain())

generator = torch.Generator().manual_seed(0)
lengths = torch.randint(1, 40, (16,), generator=generator)
mask = (torch.arange(40) < lengths[:, None]).long()  # (16, 40)
batch = {"input_ids": torch.randint(5, 100, (16, 40), generator=generator) * mask, "attention_mask": mask}

# Layouts that are not exact are refused by name; "auto" takes the fastest exact one.
step = padless.regroup(batch, token_budget=128, layout="auto", report=report)
print(f"{step.layout}: {len(step)} micro-batches, occupancy {step.plan.occupancy:.0%}")
if report.allows("packed-position-ids"):
    print("packing is exact for this model")
else:  # padless.regroup(batch, 128, layout="packed", report=report) raises
    print(f"packing is refused: {report.explain('packed-position-ids')}")

# And the proof on a real optimizer step: same loss, same gradients, same parameters.
print(check_step(model, batch, token_budget=128, layout="auto", report=report).check().explain())
