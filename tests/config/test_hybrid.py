"""attention.pattern=[...]: which files a hybrid stack is made of, and what of them can be set."""

from pathlib import Path

from attnlab.config.check import check, compose


def test_a_pattern_alone_is_a_hybrid_stack_of_the_files_values() -> None:
    cfg = compose("task=wikitext2", "attention.pattern=[mtla,mtla,mha]")
    assert cfg.choices.attention == "hybrid" and list(cfg.attention.pattern) == ["mtla", "mtla", "mha"]
    for name in ("mtla", "mha"):
        assert cfg.attention.mechanisms[name] == compose("task=wikitext2", f"attention={name}").attention
    assert set(cfg.attention.mechanisms) == {"mtla", "mha"}


def test_a_multirun_takes_a_stack_with_values_of_its_own() -> None:
    words = ["attention.pattern=[sliding_window,mla]", "attention.mechanisms.sliding_window.window=4"]
    checked = check(["-m", "task=recall", *words, "+attention.mechanisms.sliding_window.qk_norm=true", "rank=16,8"])
    jobs = [job.attention.mechanisms for job in checked.jobs]
    assert {(job.sliding_window.window, job.sliding_window.qk_norm) for job in jobs} == {(4, True)}
    assert [job.rank for job in checked.jobs] == [job.mla.latent_dim for job in jobs] == [16, 8]


def test_each_job_of_a_multirun_has_its_own_mechanisms() -> None:
    checked = check(["-m", "task=wikitext2", "attention.pattern=[mtla,mha],[mha,gqa]"])
    assert [list(job.attention.mechanisms) for job in checked.jobs] == [["mtla", "mha"], ["mha", "gqa"]]
    assert checked.line.of_job(checked.texts[1]) == ["task=wikitext2", "attention.pattern=[mha,gqa]"]
    assert "attention=hybrid" in checked.for_hydra


def test_an_overlay_may_choose_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /attention: hybrid\nattention:\n  pattern: [mha, gqa]\n"
    (tmp_path / "experiment" / "mixed.yaml").write_text(text)
    cfg = check([f"--config-dir={tmp_path}", "task=wikitext2", "experiment=mixed"]).jobs[0]
    assert list(cfg.attention.mechanisms) == ["mha", "gqa"] and cfg.choices.attention == "hybrid"
