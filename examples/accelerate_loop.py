"""A loop with Accelerate: regroup each step's batch, and divide by the step's own number of targets."""

import torch
from _tiny import model, texts, tokenizer
from accelerate import Accelerator
from transformers import DataCollatorForLanguageModeling

import padless
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask

accelerator = Accelerator(cpu=True)
group = torch.distributed.group.WORLD if accelerator.num_processes > 1 else None
tokens = tokenizer()
rows = [tokens(text) for text in texts(256)]
collate = DataCollatorForLanguageModeling(tokens, mlm=False)
loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate)
net = model()
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)

for batch in loader:
    counts = denominators(target_mask(batch["labels"], batch["attention_mask"]), process_group=group)
    regrouped = padless.regroup(batch, 2048, process_group=group)
    step = padless.accumulate(regrouped, net, optimizer, denominators=counts, max_norm=1.0)
    for micro in step:
        inputs = micro.inputs
        logits = net(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        targets = target_mask(inputs["labels"], inputs["attention_mask"])
        step.backward(aggregate(token_losses(logits, inputs["labels"]), targets, denominators=counts))
    print(f"loss {step.loss:.3f}, {len(regrouped)} micro-batches, occupancy {regrouped.plan.occupancy:.2f}")
