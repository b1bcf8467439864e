"""Two changed lines: a DataLoader whose micro-batches fit a token budget, in a loop that resumes anywhere."""

import random

import torch
from torch.utils.data import DataLoader

from padless.data import PaddedCollator, TokenBudgetSampler, measure
from padless.metrics import Meter


def main(steps: int = 6) -> dict[str, float]:
    rng = random.Random(0)
    data = [{"input_ids": [rng.randrange(2, 100) for _ in range(rng.randrange(5, 200))]} for _ in range(400)]

    measured = measure(data)  # of what the dataset returns; kept beside the data when it is read from files
    sampler = TokenBudgetSampler(measured, targets=measured.lengths - 1, token_budget=2048, sequences_per_step=64)
    loader = DataLoader(sampler.rows(data), batch_sampler=sampler, collate_fn=PaddedCollator(multiple_of=8))

    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    meter = Meter()
    for batch in meter.watch(sampler.follow(loader)):
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / sampler.current.step_targets).backward()  # the mean over the whole optimizer step, on any ranks
        meter.add_batch(batch)
        if sampler.at_step_boundary:
            optimizer.step()
            optimizer.zero_grad()
            meter.step()
            checkpoint = {"model": model.state_dict(), "sampler": sampler.state_dict()}  # any micro-batch would do
        if meter.steps == steps:
            break
    sampler.load_state_dict(checkpoint["sampler"])  # continues with what has not been seen, on any number of ranks
    return meter.to_dict()


if __name__ == "__main__":
    print({name: value for name, value in main().items() if name in ("steps", "occupancy", "real_tokens_per_second")})
