"""The command: a page of the kept runs, a run in the terminal, two runs compared."""

import pytest

from flashattn.report.__main__ import main


def row(impl, seconds=2e-5, mode="eager"):
    """Return the host's time for a call."""
    facts = {"study": "launch", "name": f"{impl}-{mode}", "status": "ok", "seconds": seconds}
    return facts | {"impl": impl, "mode": mode, "pass": "forward", "problem": "p"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of an H200's runs, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".benchmarks" / "nvidia-h200"


def test_page_is_of_all_runs_of_the_newest_accelerator(folder, keep, capsys):
    """Without arguments the runs of the accelerator measured last become one page."""
    keep(folder / "0001_x.json", row("triton", 3e-5))
    keep(folder / "0002_x.json", row("sdpa", 1e-5), made="2026-01-02")
    keep(folder.parent / "cpu" / "0001_x.json", row("flex"), machine="cpu", made="2025-01-01")
    main([])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Written: report/index.html, of 2 runs"
    assert said[1].startswith("Launching: forward, eager: a call of triton costs the host 30 µs")
    made = {path.name for path in (folder.parents[1] / "report").iterdir()}
    assert made == {"index.html", "report.md", "launch-host.svg"}
    assert "flex" not in (folder.parents[1] / "report" / "report.md").read_text()


def test_accelerator_runs_and_output_are_options(folder, keep, capsys):
    """Another accelerator, some named runs and another folder for the page can be chosen."""
    path = keep(folder / "0001_x.json", row("triton"), made="2026-01-02")
    keep(folder / "0002_x.json", row("sdpa"), made="2026-01-02")
    keep(folder.parent / "cpu" / "0001_x.json", row("flex"), machine="cpu", made="2025-01-01")
    main(["--accelerator", "cpu", "--output", "page", "--folder", ".benchmarks"])
    assert "page/index.html, of 1 run\n" in capsys.readouterr().out
    assert "flex" in (folder.parents[1] / "page" / "report.md").read_text()
    main([str(path)])
    assert "report/index.html, of 1 run\n" in capsys.readouterr().out
    assert "sdpa" not in (folder.parents[1] / "report" / "report.md").read_text()


def test_compare_prints_verdicts(folder, keep, capsys):
    """``compare A B`` prints what became of A's cases in B."""
    runs = [keep(folder / f"000{i}_x.json", row("triton", i * 1e-5)) for i in (1, 2)]
    main(["compare", *map(str, runs)])
    said = capsys.readouterr().out
    assert "1 slower." in said
    assert "launch: triton-eager" in said


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "pytest benchmarks"),
        (["missing.json"], "missing.json"),
        (["show", "missing.json"], "missing.json"),
        (["compare", "missing.json"], "required"),
        (["--accelerator", "tpu"], "wanted one of cpu, empty, nvidia-h200, got tpu"),
        (["compare", ".benchmarks/nvidia-h200/0001_x.json", ".benchmarks/cpu/0001_x.json"], "cpu"),
        ([".benchmarks/empty/0001_x.json"], "wanted rows of at least one study"),
        (["accuracy"], "make some: pytest benchmarks/bench_accuracy.py"),
    ],
)
def test_mistake_is_one_line(folder, keep, capsys, arguments, wanted):
    """A mistake ends with status 2 and a line that says what is missing."""
    if arguments:
        keep(folder / "0001_x.json", row("triton"))
        keep(folder.parent / "cpu" / "0001_x.json", row("triton"), machine="cpu")
        keep(folder.parent / "empty" / "0001_x.json", machine="empty")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_tables_of_a_run_or_of_one_study(folder, keep, capsys):
    """``show RUN`` prints all tables of a run; a study's name prints and draws its own."""
    path = keep(folder / "0001_x.json", row("triton"), {**row("flex"), "study": "warmup"})
    for arguments, others in ((["show", str(path)], True), (["launch", "--output", "page"], False)):
        main(arguments)
        said = capsys.readouterr().out
        assert ["triton", "forward", "p", "20"] in map(str.split, said.splitlines())
        assert ("flex" in said) == others
    assert said.endswith("Drawn: page/launch-host.png\n")
    assert [path.name for path in (folder.parents[1] / "page").iterdir()] == ["launch-host.png"]
