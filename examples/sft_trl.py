"""TRL's SFTTrainer with padless: prompts are masked, rows of very different lengths share each step."""

from _tiny import model, texts, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from padless.integrations.trl import PadlessOptions, with_padless

pairs = zip(texts(256, seed=1, mean=2.5), texts(256, seed=2), strict=True)
trainer = with_padless(SFTTrainer)(
    padless=PadlessOptions(token_budget=2048, multiple_of=8),
    model=model(),
    args=SFTConfig(
        output_dir="/tmp/padless-sft",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list([{"prompt": prompt, "completion": answer} for prompt, answer in pairs]),
    processing_class=tokenizer(),
)
trainer.train()
print(f"occupancy {trainer.state.log_history[-2]['padless/occupancy']:.2f}")
