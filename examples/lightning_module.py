"""Lightning with padless: write token_losses; the mixin regroups, accumulates, clips and steps."""

import lightning
import torch
from _tiny import model, texts, tokenizer
from transformers import DataCollatorForLanguageModeling

from padless.integrations.lightning import PadlessModuleMixin
from padless.logits import token_losses


class Module(PadlessModuleMixin, lightning.LightningModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.model = model()

    def token_losses(self, inputs):
        logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return token_losses(logits, inputs["labels"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


tokens = tokenizer()
rows = [tokens(text) for text in texts(256)]
collate = DataCollatorForLanguageModeling(tokens, mlm=False)
loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate)
trainer = lightning.Trainer(
    accelerator="cpu", max_steps=8, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(token_budget=2048, clip_norm=1.0), loader)
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
