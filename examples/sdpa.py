"""PyTorch's own attention layer, unchanged, runs on our kernels; compiled and not, both passes."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from flashattn.integrations import sdpa


def main() -> None:
    """Train one step with PyTorch's kernels and one with ours; print how far apart they are."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(DEVICE)
    x = torch.randn(2, 48, 64, device=DEVICE)

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        layer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    wanted = step(layer)
    with sdpa.enabled(DEVICE):
        for name, model in {"eager": layer, "compiled": torch.compile(layer)}.items():
            apart = max(
                (a - b).abs().max().item() for a, b in zip(step(model), wanted, strict=True)
            )
            print(f"{name}: largest difference {apart:.1e}")


if __name__ == "__main__":
    main()
