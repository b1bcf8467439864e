"""A plain PyTorch loop: an optimizer step's batch as micro-batches under a token budget."""

import torch
from _tiny import model, texts, tokenizer

import padless
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask


def batches(rows, size):
    """Padded batches with labels: 32 rows are one optimizer step."""
    tokens = tokenizer()
    for start in range(0, len(rows), size):
        batch = dict(tokens(rows[start : start + size], padding=True, return_tensors="pt", return_token_type_ids=False))
        yield batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def main():
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in batches(texts(128), 32):
        counts = denominators(target_mask(batch["labels"], batch["attention_mask"]))
        micro_batches = padless.regroup(batch, token_budget=1024)
        step = padless.accumulate(micro_batches, net, optimizer, max_norm=1.0)
        for micro in step:
            labels = micro.inputs.pop("labels")
            losses = token_losses(net(**micro.inputs).logits, labels)  # (rows, width)
            step.backward(aggregate(losses, target_mask(labels), denominators=counts))
        plan = micro_batches.plan
        padded = batch["input_ids"].numel()
        print(
            f"loss {step.loss:.4f}: {plan.padded_tokens} tokens computed, not {padded}, in {len(micro_batches)} parts"
        )


if __name__ == "__main__":
    main()
