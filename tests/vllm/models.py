"""Tiny models that need more than weights: a tokenizer, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kv_canary.difftest.stress.vllm.engine import VOCABULARY

# The token that stands where a picture is, and how many of it a picture takes.
PICTURE, PICTURE_TOKENS = 3, 8


def tokenizer() -> Any:
    """Return a tokenizer of as many words as the models have tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {("<image>" if n == PICTURE else f"t{n}"): n for n in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(names, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    more = {"additional_special_tokens": ["<image>"]}
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", **more)


def save_model_of_pictures(folder: Path) -> str:
    """Save a BLIP-2 of random weights, whose pictures stand before the prompt, and return the folder."""
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    looks_at = BlipImageProcessor(size={"height": 28, "width": 28})
    Blip2Processor(looks_at, tokenizer(), num_query_tokens=PICTURE_TOKENS).save_pretrained(folder)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    queries = Blip2QFormerConfig(**sizes, encoder_hidden_size=32, cross_attention_frequency=2, vocab_size=VOCABULARY)
    text = OPTConfig(
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=600,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**sizes, image_size=28, patch_size=7).to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=PICTURE_TOKENS,
        image_token_index=PICTURE,
    )
    Blip2ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def picture(seed: int) -> Any:
    """Return a picture that no other seed has."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (28, 28, 3), dtype=np.uint8))
