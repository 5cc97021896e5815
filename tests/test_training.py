"""The trainer: what each step does, under which precision, in which phases."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import ANY, Mock

import pytest
import torch

from flashattn import attention
from flashattn.lm import SIZES, Config, cross_entropy
from flashattn.training import Trainer

TOY = Config(width=32, hidden=48, layers=1, heads=2, vocab=40, longest=32)
naive = partial(attention, causal=True, impl="naive")


def trainer_of(config=TOY, **options):
    """Make a trainer of two sequences of 16 tokens on the CPU."""
    facts = {"attention": naive, "batch": 2, "context": 16, "precision": "fp32", "device": "cpu"}
    return Trainer(config, **(facts | options))


def weights_of(trainer):
    """Copy the parameters."""
    return [x.detach().clone() for x in trainer.model.parameters()]


def test_training_learns(device):
    """Ten steps on one batch bring the loss of a fresh model, near ln V + 1/2, well down."""
    trainer = trainer_of(SIZES["tiny"], context=64, device=device)
    losses = [trainer.train().item() for _ in range(10)]
    assert losses[0] == pytest.approx(7.4, abs=0.3)  # ln 1000 + 1/2: logits of variance 1
    assert losses[-1] < losses[0] - 2


def test_forward_and_loss():
    """``forward`` gives logits without a graph; ``loss`` their cross-entropy, with its graph."""
    trainer = trainer_of()
    logits, loss = trainer.forward(), trainer.loss()
    assert not logits.requires_grad
    assert torch.equal(logits, trainer.model(trainer.tokens))
    assert loss.grad_fn is not None
    assert torch.equal(loss, cross_entropy(logits, trainer.targets))
    assert not torch.equal(trainer.tokens, trainer.targets)


def test_forward_backward_replaces_gradients():
    """Two calls leave one call's gradients, where ``backward`` alone would add them up."""
    trainer = trainer_of()
    trainer.forward_backward()
    once = [x.grad.clone() for x in trainer.model.parameters()]
    loss = trainer.forward_backward()
    assert all(map(torch.equal, once, (x.grad for x in trainer.model.parameters())))
    assert loss.grad_fn is None
    trainer.backward(trainer.loss())
    for a, x in zip(once, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(x.grad, 2 * a)


def test_train_is_adamw(device):
    """``train`` is ``forward_backward`` and one step of torch's own AdamW, fused on a GPU only."""
    trainer, other = trainer_of(), trainer_of()
    loss = trainer.train()
    optimizer = torch.optim.AdamW(other.model.parameters())
    assert torch.equal(loss, other.forward_backward())
    before = weights_of(other)
    optimizer.step()
    assert all(map(torch.equal, weights_of(trainer), weights_of(other)))
    assert not any(map(torch.equal, weights_of(trainer), before))
    fused = trainer_of(device=device).optimizer.defaults["fused"]
    assert bool(fused) == (device.type == "cuda")


def test_phases():
    """Each step runs its parts one after the other, each in a phase of its own."""
    seen = []

    @contextmanager
    def phase(name):
        seen.append(name)
        yield
        seen.append("end")

    trainer = trainer_of(phase=phase)
    parts = {
        trainer.forward: ["forward"],
        trainer.loss: ["forward", "loss"],
        trainer.forward_backward: ["forward", "loss", "backward"],
        trainer.train: ["forward", "loss", "backward", "optimizer"],
    }
    for step, names in parts.items():
        seen.clear()
        step()
        assert seen == [x for name in names for x in (name, "end")]


def test_seed():
    """A seed determines parameters and tokens, and leaves torch's own generator as it was."""
    state = torch.get_rng_state()
    a, b, c = trainer_of(), trainer_of(), trainer_of(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, weights_of(a), weights_of(b)))
    assert torch.equal(a.tokens, b.tokens)
    assert not torch.equal(a.model.head.weight, c.model.head.weight)
    assert not torch.equal(a.tokens, c.tokens)


LOGITS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(("precision", "logits"), LOGITS.items())
def test_precisions(precision, logits):
    """Autocast decides the logits' dtype; loss, parameters and gradients are always fp32."""
    trainer = trainer_of(precision=precision)
    assert trainer.forward().dtype == getattr(torch, logits)
    assert trainer.train().dtype == torch.float32
    for x in trainer.model.parameters():
        assert x.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize(("precision", "mode"), [("tf32", "tf32"), ("fp32", "ieee")])
@pytest.mark.parametrize("before", ["ieee", "tf32", "none"])
def test_products_mode(matmul, precision, mode, before):
    """Every part runs in the precision's mode; the mode is restored, even after a failure."""
    matmul.fp32_precision, seen = before, []

    @contextmanager
    def phase(name):
        seen.append(matmul.fp32_precision)
        yield
        if len(seen) > 4:
            raise ArithmeticError(name)

    trainer = trainer_of(precision=precision, phase=phase)
    trainer.forward()
    trainer.forward_backward()
    assert seen == [mode] * 4
    with pytest.raises(ArithmeticError):
        trainer.forward()
    assert matmul.fp32_precision == before


def test_compiled(monkeypatch):
    """A compiled trainer compiles its model as one graph, and learns as the eager one does."""
    compiled = Mock(wraps=partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", compiled)
    trainer, eager = trainer_of(compiled=True), trainer_of()
    compiled.assert_called_once_with(ANY, fullgraph=True)
    torch.testing.assert_close(trainer.forward(), eager.forward())
    torch.testing.assert_close(trainer.train(), eager.train())
    torch.testing.assert_close(weights_of(trainer), weights_of(eager))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp8"}, "precision: wanted one of fp32, tf32, bf16, fp16, got 'fp8'"),
        ({"batch": 0}, "batch: wanted at least 1, got 0"),
        ({"context": 0}, "context: wanted 1 to 32, got 0"),
        ({"context": 33}, "context: wanted 1 to 32, got 33"),
    ],
)
def test_bad_arguments(change, words):
    """An invalid argument is refused by name."""
    with pytest.raises(ValueError, match=words):
        trainer_of(**change)
