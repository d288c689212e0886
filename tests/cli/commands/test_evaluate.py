from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago


def test_whole_episodes_with_an_interval(amago: Amago, small: Path) -> None:
    done = amago("evaluate", small, "--episodes", 4, "--output", "json")
    assert done.code == 0, done.err
    metrics = done.json["metrics"]
    assert metrics["episodes"] == 4
    low, high = metrics["return_ci95"]
    assert low <= metrics["return_mean"] <= high
    assert metrics.keys() >= {"per_task", "return_std"}


def test_a_gate_that_is_not_met_is_exit_5_and_shows_the_scores(amago: Amago, small: Path) -> None:
    failed = amago("evaluate", small, "--episodes", 2, "--require", "return_mean >= 1e6", "--output", "json")
    assert failed.code == 5
    assert failed.json["status"] == "failed"
    assert failed.json["metrics"]["episodes"] == 2
    assert amago("evaluate", small, "--episodes", 2, "--require", "return_mean >= 0").code == 0


def test_greedy_and_sampled_and_seed_reach_the_settings(amago: Amago, small: Path) -> None:
    shown = amago("evaluate", small, "--sample", "--seed", 7, "--dry-run", "--output", "json").json["settings"]
    assert (shown["evaluate"]["greedy"], shown["evaluate"]["seed"]) == (False, 7)
    assert shown["seed"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 3, "no run at 'nowhere'"),
        (["small", "--episodes", "0"], 2, "evaluate.episodes"),
        (["small", "--checkpoint", "99"], 3, "99"),
        (["small", "--require", "rubbish"], 2, "rubbish"),
        (["small", "--require", "no_such_metric > 1"], 2, "no_such_metric"),
        (["small", "--env", "tmaze"], 3, "tmaze"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, small: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("evaluate", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_a_return_is_normalised_by_the_task_that_is_named(amago: Amago, small: Path) -> None:
    chosen = ("--episodes", 2, "--set", "evaluate.reference=hopper", "--require", "normalized_score < 50")
    done = amago("evaluate", small, *chosen, "--output", "json")
    assert done.code == 0, done.err
    metrics = done.json["metrics"]
    assert metrics["normalized_score"] == pytest.approx(100 * (metrics["return_mean"] + 20.272305) / 3254.572305)
    plain = amago("evaluate", small, "--episodes", 2, "--set", "evaluate.reference=auto", "--output", "json")
    assert plain.json["status"] == "skipped"  # the same episodes, which no task of D4RL has
    assert "normalized_score" not in plain.json["metrics"]


def test_videos_are_written_listed_and_counted(amago: Amago, small: Path) -> None:
    av = pytest.importorskip("av", reason='PyAV is not installed: pip install "amago[video]"')
    pytest.importorskip("pygame", reason="pygame is not installed")
    done = amago("evaluate", small, "--greedy", "--episodes", 3, "--video", 2, "--to", "films", "--output", "json")
    assert done.code == 0, done.err
    report, *videos = map(Path, done.json["outputs"])
    assert [video.parent.name for video in videos] == ["films", "films"]
    watched = amago("watch", small, "--episode", 1, "--set", "evaluate.greedy=true", "--output", "json").json
    with av.open(str(videos[1])) as container:
        frames = sum(1 for _ in container.decode(video=0))
    assert frames == watched["metrics"]["length"] + 1
    assert report.parent.name == "evaluations"
    assert "  wrote films/" in amago("evaluate", small, "--episodes", 4, "--video", 1, "--to", "films").out


@pytest.mark.system
def test_a_bundle_plays_where_it_was_trained(amago: Amago, small: Path) -> None:
    assert amago("export", small, "--to", "policy").code == 0
    of_run = amago("evaluate", small, "--episodes", 4, "--output", "json").json["metrics"]
    done = amago("evaluate", "policy", "--episodes", 4, "--to", "scores", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["return_mean"] == of_run["return_mean"]
    assert done.json["run"] is None
    [path] = map(Path, done.json["outputs"])
    assert (path.parent, path.is_file()) == (Path("scores"), True)
    shown = amago("evaluate", "policy", "--dry-run", "--output", "json").json
    assert (shown["settings"]["env"]["name"], shown["outputs"]) == ("gym:CartPole-v1", [])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["policy", "--form", "onnx"], 3, "no form 'onnx'"),
        (["policy", "--checkpoint", "best"], 2, "a bundle has one policy"),
        (["policy", "--env", "tmaze"], 3, "policy bundle 'policy' was trained for other spaces"),
        (["policy", "--video", "1"], 2, "--to DIR"),
        (["small", "--form", "onnx"], 2, "'small' is a run"),
        (["damaged"], 4, "weights.safetensors"),
    ],
)
def test_mistakes_with_bundles_are_named(
    amago: Amago, small: Path, arguments: list[str], code: int, words: str
) -> None:
    for name in ("policy", "damaged"):
        assert amago("export", small, "--to", name).code == 0
    with Path("damaged/weights.safetensors").open("ab") as file:
        file.write(b"x")
    failed = amago("evaluate", *arguments, "--episodes", 2)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "does not name its environment"),
        (["--env", "tmaze"], 3, "not a state dict"),
        (["--follow"], 2, "is one policy"),
        (["--form", "onnx"], 2, "is one policy"),
        (["--video", "1", "--env", "tmaze"], 2, "--to DIR"),
    ],
)
def test_mistakes_with_weights_of_amago_are_one_line(
    amago: Amago, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    (tmp_path / "policy.pt").write_bytes(b"\x80\x04.")
    failed = amago("evaluate", f"amago:{tmp_path / 'policy.pt'}", *arguments)
    assert failed.code == code
    assert text in failed.err
    assert "Traceback" not in failed.err
