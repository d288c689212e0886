"""gymnasium environments: spaces of every kind, true final observations, seeds, and clear words for what breaks."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pipelines.envs.env import Env
from pipelines.envs.make import make
from pipelines.envs.spec import ActionCodec, ObservationCodec
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged

EVERYTHING = "tests.envs.own:Everything"
LINE = "tests.envs.own:Line"


def test_observations_of_every_kind_become_flat_columns():
    env = make(EVERYTHING, num_envs=2, seed=0)
    assert dict(env.spec.spaces.observation) == {
        "obs.image": Box(shape=(5, 4, 3), dtype="uint8"),
        "obs.inner.place": Box(shape=(2,)),
        "obs.kind": Discrete(n=3, start=10),
        "obs.pair.0": MultiDiscrete(nvec=(2, 5), start=(1, 2)),
        "obs.pair.1": MultiBinary(n=3),
    }
    assert env.spec.spaces.observation["obs.image"].is_image
    env.reset()
    result = env.step(np.array([0, 2], np.int32))
    assert (result.observation["obs.image"] == 1).all()
    assert result.observation["obs.inner.place"].dtype == np.float32
    assert result.observation["obs.kind"].tolist() == [1, 1]
    assert result.observation["obs.pair.0"].tolist() == [[1, 1], [1, 1]]
    assert result.observation["obs.pair.1"].tolist() == [[1, 0, 1], [1, 0, 1]]
    assert [e.unwrapped.received for e in env.envs] == [[-1], [1]]


TOLD = "tests.envs.own:Told"


def test_texts_and_sequences_are_padded_and_say_their_length():
    env = make(TOLD, num_envs=2, seed=0, params={"max_length": 20})
    assert dict(env.spec.spaces.observation) == {
        "obs.mission.length": Discrete(n=21),
        "obs.mission": Ragged(max_length=20, dtype="int32", scale=255.0, text=True),
        "obs.note.length": Discrete(n=9),
        "obs.note": Ragged(max_length=8, dtype="uint8", scale=122.0, text=True),
        "obs.places.length": Discrete(n=21),
        "obs.places": Ragged(max_length=20),
        "obs.events.length": Discrete(n=21),
        "obs.events": Ragged(max_length=20, dtype="int32", scale=4.0),
    }
    first = env.reset()
    for i, inner in enumerate(env.envs):
        assert env.goal_texts(np.array([i])) == [f"go to the ünd {inner.unwrapped.asked}"]
        assert "".join(map(chr, first["obs.mission"][i, :15])) == env.goal_texts(np.array([i]))[0]
    assert first["obs.mission.length"].tolist() == [15, 15]
    assert not first["obs.mission"][:, 15:].any()
    for _ in range(2):
        now = env.step(np.zeros(2, np.int32)).observation
    assert now["obs.note"].tolist() == [[97, 98, 0, 0, 0, 0, 0, 0]] * 2
    assert now["obs.places.length"].tolist() == [4, 4]
    np.testing.assert_allclose(now["obs.places"][0, :5], [0, 0.2, 0.1, 0.2, 0])
    assert now["obs.events"][1, :3].tolist() == [1, 2, 0]


def test_what_is_longer_than_its_room_is_refused_with_a_way_out():
    env = make(TOLD, num_envs=1, seed=0, params={"max_length": 14})
    with pytest.raises(StageFailed, match=r"obs\.mission.*length of 15, more than 14.*env\.max_length"):
        env.reset()


class Twice(gymnasium.Env):
    observation_space = spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    action_space = spaces.Discrete(2)


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(UsageError, match=r"two parts .* 'obs\.a\.b'"):
        make("tests.envs.test_gymnasium_env:Twice", num_envs=1, seed=0)


@pytest.mark.parametrize(
    ("space", "ours", "given", "received"),
    [
        (spaces.Discrete(3, start=5), Discrete(n=3, start=5), 2, 7),
        (
            spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)),
            Box(shape=(2,), low=(-2, 0), high=(2, 10)),
            [0.5, -1],
            [1, 0],
        ),
        (spaces.Box(-np.inf, np.inf, (1,)), Box(shape=(1,), low=(-1,), high=(1,)), [0.25], [0.25]),
        (spaces.Box(10, np.inf, (1,)), Box(shape=(1,), low=(10,), high=(12,)), [0.25], [11.25]),
        (spaces.Box(-np.inf, -3, (1,)), Box(shape=(1,), low=(-5,), high=(-3,)), [-1.0], [-5.0]),
        (spaces.MultiDiscrete([3, 4], start=[1, 0]), MultiDiscrete(nvec=(3, 4), start=(1, 0)), [2, 3], [3, 3]),
        (spaces.MultiBinary(2), MultiBinary(n=2), [1, 0], [1, 0]),
    ],
    ids=["discrete", "box", "unbounded", "bounded below", "bounded above", "multi-discrete", "multi-binary"],
)
def test_actions_cross_the_edge(space, ours, given, received):
    env = make(EVERYTHING, num_envs=1, seed=0, params={"action_space": space})
    assert env.spec.spaces.action == ours
    env.reset()
    env.step(np.array([given], dtype=ours.dtype))
    action = env.envs[0].unwrapped.received[0]
    assert space.contains(action)
    np.testing.assert_allclose(action, received)


def test_final_observation_is_the_episodes_own():
    env = make("gym:CartPole-v1", num_envs=3, seed=0, params={"max_episode_steps": 5})
    twin = gymnasium.make("CartPole-v1")
    env.reset()
    expected, _ = twin.reset(seed=int(env._seeds[1]))
    for step in range(5):
        result = env.step(np.full(3, step % 2))
        expected, *_ = twin.step(step % 2)
        np.testing.assert_array_equal(result.observation["obs"][1], expected)
    assert result.truncated.all()
    assert not result.terminated.any()
    before = result.observation["obs"].copy()
    after = env.reset(np.array([False, True, False]))["obs"]
    np.testing.assert_array_equal(result.observation["obs"], before)
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert np.abs(after[1]).max() <= 0.05


def test_an_episode_begins_alike_however_many_actors_there_are():
    four, two = (make("gym:CartPole-v1", num_envs=n, seed=7) for n in (4, 2))
    first, later = two.reset()["obs"], two.reset()["obs"]
    np.testing.assert_array_equal(four.reset()["obs"], np.concatenate([first, later]))


def test_training_and_test_seeds_are_apart():
    train, test = (make("gym:CartPole-v1", num_envs=2, seed=7, split=split) for split in ("train", "test"))
    train.reset(), test.reset()
    assert (train._seeds % 2 == 0).all()
    assert (test._seeds % 2 == 1).all()


def test_success_is_read_where_the_user_says():
    env = make(EVERYTHING, num_envs=8, seed=0, params={"success_key": "is_success", "length": 1})
    origin = env.reset()["obs.inner.place"][:, 1]
    assert env.spec.has_success
    np.testing.assert_array_equal(env.step(np.zeros(8, np.int32)).success, origin > 0.5)


def test_a_wrong_success_key_is_named():
    env = make(EVERYTHING, num_envs=1, seed=0, params={"success_key": "won", "length": 1})
    env.reset()
    with pytest.raises(UsageError, match=r"no key 'won'.*is_success"):
        env.step(np.zeros(1, np.int32))


def test_horizon_comes_from_the_registration_or_the_user():
    assert make("gym:CartPole-v1", num_envs=1, seed=0).spec.horizon == 500
    assert make("gym:CartPole-v1", num_envs=1, seed=0, params={"max_episode_steps": 9}).spec.horizon == 9
    own = make(LINE, num_envs=1, seed=0, params={"max_episode_steps": 2})
    own.reset()
    own.step(np.zeros(1, np.int32))
    assert own.step(np.zeros(1, np.int32)).truncated.all()
    assert own.spec.horizon == 2


@pytest.mark.parametrize(("repeat", "decisions"), [(3, 67), (200, 1)])
def test_an_action_is_repeated_until_the_episode_ends(repeat, decisions):
    """Judged by gymnasium's own pendulum, stepped by hand."""
    env = make("gym:Pendulum-v1", num_envs=2, seed=4, params={"action_repeat": repeat})
    assert env.spec.horizon == decisions
    shown = env.reset()["obs"]
    hands = [gymnasium.make("Pendulum-v1") for _ in range(2)]
    for hand, row, seed in zip(hands, shown, env.seeds(np.arange(2)), strict=True):
        np.testing.assert_array_equal(hand.reset(seed=seed)[0], row)
    for decision in range(decisions):
        actions = np.random.default_rng(decision).uniform(-1, 1, (2, 1)).astype(np.float32)
        result = env.step(actions)
        for i, hand in enumerate(hands):
            steps = [hand.step(2 * actions[i]) for _ in range(min(repeat, 200 - decision * repeat))]
            np.testing.assert_allclose(result.observation["obs"][i], steps[-1][0], atol=1e-5)
            assert result.reward[i] == pytest.approx(sum(step[1] for step in steps), abs=1e-4)
        assert result.truncated.tolist() == [decision == decisions - 1] * 2


def test_an_action_is_not_repeated_into_the_next_attempt():
    """An attempt of three steps is two decisions, of which the second is one step."""
    env = make(LINE, num_envs=1, seed=0, params={"attempts": 2, "action_repeat": 2, "max_episode_steps": 3})
    assert env.spec.horizon == 4
    env.reset()
    results = [env.step(np.ones(1, np.int32)) for _ in range(4)]
    assert [bool(result.attempt_end[0]) for result in results] == [False, True, False, True]
    assert [float(result.observation["obs.observation"][0, 0]) for result in results] == [2, 0, 2, 3]
    assert [bool(result.terminated[0]) for result in results] == [False, False, False, True]


def test_keyword_arguments_reach_the_environment():
    assert make("gym:Pendulum-v1", num_envs=1, seed=0, params={"g": 3.0}).envs[0].unwrapped.g == 3.0
    assert make("tests.envs.own:factory", num_envs=1, seed=0, params={"fault": "x"}).envs[0].fault == "x"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ZeroDivisionError: it broke"),
        ("exit", "SystemExit: it left"),
        ("nan-observation", "observation 'obs' is not finite"),
        ("shape", r"observation 'obs' has shape \(2,\), its space says \(1,\)"),
    ],
)
def test_a_broken_environment_is_named_with_its_cause(fault, words):
    env = make(LINE, num_envs=2, seed=0, params={"fault": fault})
    env.reset()
    env.step(np.zeros(2, np.int32))
    env.step(np.zeros(2, np.int32))
    with pytest.raises(StageFailed, match=f"environment '{LINE}' failed in step .*{words}") as caught:
        env.step(np.zeros(2, np.int32))
    assert caught.value.__cause__ is not None


def test_a_failing_reset_is_named():
    with pytest.raises(StageFailed, match=r"failed in reset .*cannot begin"):
        make(LINE, num_envs=1, seed=0, params={"fault": "reset"}).reset()


def test_unsupported_spaces_are_refused():
    with pytest.raises(UsageError, match="action space Dict is not supported"):
        make(EVERYTHING, num_envs=1, seed=0, params={"action_space": spaces.Dict(a=spaces.Discrete(2))})
    with pytest.raises(UsageError, match="action space Text is not supported"):
        make(EVERYTHING, num_envs=1, seed=0, params={"action_space": spaces.Text(3)})
    with pytest.raises(UsageError, match="Sequence of Text is not supported"):
        ObservationCodec(spaces.Sequence(spaces.Text(3)), name="x")
    with pytest.raises(UsageError, match="observation 'obs' space Graph is not supported"):
        ObservationCodec(spaces.Graph(spaces.Box(0, 1), None), name="x")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("gym:CartPol-v1", UsageError, "CartPole"),
        ("gym:CartPole-v99", UsageError, "CartPole"),
        ("gym:CarRacing-v3", InputMissing, r"needs the extra .box2d."),
        ("no_such_module:Env", InputMissing, "no module 'no_such_module'"),
        ("tests.envs.own:Nothing", InputMissing, "has no 'Nothing'"),
        ("tests.envs.own:not_an_environment", UsageError, "gives int, not a gymnasium.Env"),
    ],
)
def test_what_cannot_be_made_is_explained(name, error, words):
    if name == "gym:CarRacing-v3":
        pytest.importorskip("gymnasium")
        try:
            import Box2D  # noqa: F401
        except ModuleNotFoundError:
            pass
        else:
            pytest.skip("Box2D is installed")
    with pytest.raises(error, match=words):
        make(name, num_envs=1, seed=0)


def test_a_subclass_of_our_own_env_is_made_as_a_batch():
    env = make("tests.envs.test_gymnasium_env:Batch", num_envs=5, seed=0, params={"value": 2})
    assert isinstance(env, Batch)
    assert (env.num_envs, env.value) == (5, 2)


class Batch(Env):
    def __init__(self, *, num_envs, seed, split, value):
        super().__init__(num_envs=num_envs)
        self.value = value

    def reset(self, mask=None):
        raise NotImplementedError

    def step(self, actions):
        raise NotImplementedError

    def tasks(self, indices):
        raise NotImplementedError


def test_about_is_the_first_sentence_under_the_headings() -> None:
    about = make("gym:CartPole-v1", num_envs=1, seed=0).spec.about
    assert about.startswith("This environment corresponds to")
    assert about.endswith(".")
    assert "\n" not in about


@pytest.mark.parametrize(("value", "dtype"), [(300, "int64"), (-1, "int64"), (0.5, "float64")])
def test_a_value_that_its_column_cannot_hold_is_refused(value, dtype):
    env = make("tests.envs.own:Pixels", num_envs=1, seed=0, params={"value": value, "dtype": dtype})
    with pytest.raises(StageFailed, match="is not uint8"):
        env.reset()


def test_a_value_of_another_type_is_held_where_it_can_be_and_closing_never_fails():
    env = make("tests.envs.own:Pixels", num_envs=1, seed=0, params={"value": 7.0, "dtype": "float64"})
    assert (env.reset()["obs"] == 7).all()
    env.close()


def test_the_place_of_a_failure_is_told():
    env = make(LINE, num_envs=1, seed=0, params={"fault": "raise"})
    env.reset()
    env.step(np.zeros(1, np.int32))
    env.step(np.zeros(1, np.int32))
    with pytest.raises(StageFailed, match=r"it broke \(.*own.py, line \d+\); -v shows"):
        env.step(np.zeros(1, np.int32))


def test_a_box_of_integers_gets_the_nearest_one():
    codec = ActionCodec(spaces.Box(0, 4, (1,), np.int64), name="x")
    given = np.array([[-1.0], [-0.3], [0.2], [1.0]], np.float32)
    assert [int(action[0]) for action in codec.decode(given)] == [0, 1, 2, 4]


def test_a_module_that_registers_an_environment_is_named_before_its_id(tmp_path, monkeypatch):
    (tmp_path / "brings_a_line.py").write_text(
        "import gymnasium\ngymnasium.register('BroughtLine-v0', entry_point='tests.envs.own:Line')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = make("gym:brings_a_line:BroughtLine-v0", num_envs=2, seed=0, params={"max_episode_steps": 2})
    assert env.spec.horizon == 2
    env.reset()
    env.step(np.zeros(2, dtype=np.int32))
    assert env.step(np.zeros(2, dtype=np.int32)).truncated.all()
    with pytest.raises(InputMissing, match="cannot be made: No module named 'brings_nothing'"):
        make("gym:brings_nothing:Line-v0", num_envs=1, seed=0)


def test_observations_that_are_not_finite_are_found_by_row() -> None:
    codec = ObservationCodec(gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32), name="x")
    columns = codec.empty(3)
    for row, value in enumerate(([0.0, 1.0], [np.nan, 0.0], [1.0, np.inf])):
        codec.write(np.array(value, dtype=np.float32), columns, row)
    assert codec.not_finite(columns) == {
        1: "observation 'obs' is not finite: [nan  0.]",
        2: "observation 'obs' is not finite: [ 1. inf]",
    }
