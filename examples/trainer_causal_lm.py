"""Hugging Face Trainer with padless: two lines differ from the Trainer alone."""

from _tiny import model, texts, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from padless.integrations.transformers import with_padless

tokens = tokenizer()
trainer = with_padless(Trainer)(  # was: Trainer(
    token_budget=2048,  # new: the padded tokens that one micro-batch may have
    model=model(),
    args=TrainingArguments(
        output_dir="/tmp/padless-trainer",
        per_device_train_batch_size=32,
        max_steps=8,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    ),
    train_dataset=[tokens(text) for text in texts(256)],
    data_collator=DataCollatorForLanguageModeling(tokens, mlm=False),
)
trainer.train()
last = trainer.state.log_history[-2]
print({key: round(value, 3) for key, value in last.items() if key.startswith("padless/")})
