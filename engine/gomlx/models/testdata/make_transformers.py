"""Writes the small random models that TestTransformers reads, with the logits that transformers computes of them.

Usage: python make_transformers.py FOLDER (with torch, transformers 5.23 and safetensors)
"""
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

models = {
    "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4)),
    "llama": LlamaForCausalLM(LlamaConfig(vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                          rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-6)),
    # The head's weights are those of the embedding, and the width of a head is not width / heads.
    "llama-tied": LlamaForCausalLM(LlamaConfig(vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                               num_attention_heads=4, head_dim=12, max_position_embeddings=32,
                                               tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "gemma3": Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                                 num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                                 query_pre_attn_scalar=8, max_position_embeddings=32,
                                                 layer_types=["full_attention"] * 2, tie_word_embeddings=False,
                                                 rope_parameters={"full_attention": {"rope_type": "default",
                                                                                     "rope_theta": 5000.0}})),
}
for name, model in models.items():
    torch.manual_seed(len(name))
    with torch.no_grad():
        for p in model.parameters():  # values that show every mistake: no zeros, no ones
            p.copy_(torch.randn_like(p) * 0.25 + (1 if p.dim() == 1 else 0))
    model.eval()
    dir = os.path.join(sys.argv[1], name)
    # The second model is written in several files with an index.
    model.save_pretrained(dir, max_shard_size="20KB" if name == "llama" else "1GB")
    tokens = torch.randint(0, model.config.vocab_size, (2, 11))
    with torch.no_grad():
        logits = model(tokens).logits
    # Not in the model's folder, where there must be one file of weights.
    save_file({"tokens": tokens.int(), "logits": logits}, os.path.join(sys.argv[1], name + "-logits.safetensors"))
    if os.path.exists(os.path.join(dir, "generation_config.json")):
        os.remove(os.path.join(dir, "generation_config.json"))
