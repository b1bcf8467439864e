"""TRL's GRPOTrainer with padless: each micro-batch keeps the width of its own longest row."""

from _tiny import model, texts, tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from padless.integrations.trl import with_padless


def brevity(completions, **kwargs):
    return [-len(text.split()) / 64 for text in completions]


trainer = with_padless(GRPOTrainer)(
    token_budget=1024,
    model=model(),
    reward_funcs=brevity,
    args=GRPOConfig(
        output_dir="/tmp/padless-grpo",
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=64,
        max_steps=4,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list([{"prompt": text} for text in texts(64)]),
    processing_class=tokenizer(),
)
trainer.train()
print(f"occupancy {trainer.state.log_history[-2]['padless/occupancy']:.2f}")
