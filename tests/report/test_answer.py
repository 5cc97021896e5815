"""The top of the page: numbers of known rows, and a picture that can be filtered."""

from dataclasses import replace

from flashattn.report.answer import EVERY, cards, explorer
from flashattn.report.runs import Run, merge


def speeds(*seconds, n=512):
    """Return rows of ours and of a peer for one problem."""
    same = {"study": "flash", "status": "ok", "problem": f"q{n}", "pass": "forward", "seq_q": n}
    same |= {"seq_kv": n, "dtype": "bfloat16", "head_dim": 64, "causal": False, "flops": 1e9}
    same |= {"protocol": "tokens", "batch": 1024 // n, "heads": 2}
    rows = zip(("hopper", "sdpa"), seconds, strict=False)
    return [same | {"impl": name, "name": f"{n}-{name}", "seconds": s} for name, s in rows]


def run(*rows, made="2026-01-01", number="0001"):
    """Return a saved run of one machine."""
    machine, name = {"accelerator": "a", "gpu": "A GPU"}, f"a/{number}_x.json"
    return Run(machine=machine, made=made, name=name, rows=[r for each in rows for r in each])


def test_speed_is_the_geometric_mean_over_the_fastest_peer():
    """Speedups of 8 and 0.5 have the geometric mean 2, and one problem of two is faster."""
    (card,) = cards(run(speeds(1.0, 8.0), speeds(1.0, 0.5, n=1024)))
    assert (card.study, card.title, card.value) == ("flash", "Forward pass", "2.00x")
    assert card.text == (
        "the speed of the fastest peer (sdpa): geometric mean of 2 problems, 0.50x to 8.00x; "
        "faster in 1. bf16, 1024 tokens, hidden 128, D = 64."
    )
    assert card.origin == "A GPU, run 0001, 2026-01-01"


def test_old_kernels_do_not_count():
    """Problems that only an older run measured are left out, and so are peers of another run."""
    old = run(speeds(1.0, 0.1, n=1024), speeds(1.0, 0.1, n=256))
    new = run(speeds(1.0, 3.0), speeds(1.0, n=256), made="2026-01-02", number="0002")
    (card,) = cards(merge([old, new]))
    assert card.value == "3.00x"
    assert card.origin == "A GPU, run 0002, 2026-01-02"


def test_numbers_are_the_made_up_run_s(made_run, expected):
    """The cards' numbers are those of the rows, and say which rows they cover."""
    found = [f"{c.study}|{c.title}|{c.value}|{c.text}|{c.origin}" for c in cards(made_run)]
    assert found == expected["cards"]


def test_a_run_without_ours_has_no_number(made_run):
    """A run without our kernels has no cards and no picture."""
    peers = [row for row in made_run.rows if row.get("impl") not in ("triton", "hopper")]
    assert cards(replace(made_run, rows=peers)) == []
    assert explorer(replace(made_run, rows=peers)) is None


def test_filters_offer_what_was_measured(made_run):
    """Filters offer the values of the rows; the first choice is one that was measured."""
    picture, choices = explorer(made_run)
    assert choices == {
        "pass": ["forward"],
        "dtype": ["bf16"],
        "D": ["128"],
        "mask": ["full", "causal"],
        "shape": ["16384 tokens, hidden 2048", "one head"],
        "peer": [EVERY, "naive", "sdpa"],
    }
    chosen = {param["name"]: param["value"] for param in picture["params"]}
    assert all(value in choices[name] for name, value in chosen.items())
    points = [record for record in picture["data"]["values"] if not record.get("kind")]
    assert any(chosen.items() - {("peer", EVERY)} <= record.items() for record in points)
    assert picture["title"]["text"].endswith("forward, bf16, D = 128, full")
    ours = [record for record in points if record["name"] == "ours"]
    assert {record["kernel"] for record in ours} == {"hopper"}
    assert ours[0]["y"] == 512
    assert ours[0]["ms"] == 1
