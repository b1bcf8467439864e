"""DDP: rows of all ranks are planned together and moved. Run: torchrun --nproc_per_node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from _tiny import model, texts
from plain_pytorch import batches

import padless
from padless.logits import token_losses
from padless.loss import aggregate, denominators, target_mask


def main():
    dist.init_process_group("gloo")
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(model())  # or fully_shard(model()): nothing else changes
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches(texts(128)[rank::ranks], 32 // ranks):
        counts = denominators(target_mask(batch["labels"], batch["attention_mask"]), process_group=group)
        micro_batches = padless.regroup(batch, token_budget=1024, process_group=group, sync="step")
        step = padless.accumulate(micro_batches, net, optimizer)
        for micro in step:
            labels = micro.inputs.pop("labels")
            targets = target_mask(labels, document_ids=micro.document_ids)
            losses = token_losses(net(**micro.inputs).logits, labels, targets)
            step.backward(aggregate(losses, targets, denominators=counts))
        loss = step.loss.clone()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        print(f"rank {rank}: loss {loss / ranks:.4f}, {len(micro_batches)} micro-batches on every rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
