"""A small tokenizer, model and texts for the examples; nothing is downloaded."""

import random
import warnings

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

warnings.filterwarnings("ignore")
WORDS = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 512)}


def tokenizer():
    raw = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def model():
    return AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def texts(count, seed=0, mean=3.0):
    """Texts of log-normal lengths: most short, a few long."""
    rng = random.Random(seed)
    lengths = [min(int(rng.lognormvariate(mean, 0.9)) + 2, 300) for _ in range(count)]
    return [" ".join(f"w{rng.randrange(2, 512)}" for _ in range(n)) + " " for n in lengths]
