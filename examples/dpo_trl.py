"""TRL's DPOTrainer with padless: both answers of a pair stay in one micro-batch."""

from _tiny import model, texts, tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from padless.integrations.trl import with_padless

rows = zip(texts(128, seed=1, mean=2.5), texts(128, seed=2), texts(128, seed=3), strict=True)
trainer = with_padless(DPOTrainer)(
    token_budget=2048,
    model=model(),
    ref_model=model(),
    args=DPOConfig(
        output_dir="/tmp/padless-dpo",
        per_device_train_batch_size=16,
        max_steps=4,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows]),
    processing_class=tokenizer(),
)
trainer.train()
print(f"occupancy {trainer.state.log_history[-2]['padless/occupancy']:.2f}")
