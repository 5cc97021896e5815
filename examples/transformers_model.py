"""Train a transformers model on flashattn for a few steps, then compare its tokens with eager.

The model is tiny and random, so this runs on a CPU in seconds. With a GPU, load a real one::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fattn")
"""

from __future__ import annotations

import torch
from transformers import MistralConfig, MistralForCausalLM

from flashattn.integrations.transformers import register

register()

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=32,
    pad_token_id=0,
    eos_token_id=None,
    attn_implementation="fattn",
)
model = MistralForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(1, 64).repeat(2)[None, :100]  # learn to count

for step in range(20):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

# Two prompts of unequal length, the shorter one padded on the left.
prompts = torch.tensor([[0, 0, 0, 7, 8], [20, 21, 22, 23, 24]])
options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 40, "do_sample": False}
ours = model.eval().generate(prompts, **options)
model.set_attn_implementation("eager")
eager = model.generate(prompts, **options)
print("continued:", ours[1, 5:15].tolist())
print("the same tokens as eager attention:", torch.equal(ours, eager))
