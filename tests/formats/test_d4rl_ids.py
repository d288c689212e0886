"""D4RL's datasets by id: addresses and time limits as d4rl 1.1 registers them."""

from __future__ import annotations

import pytest

from pipelines.formats.flat.datasets import DATASETS, find_time_limit, name_environment


def test_all_ids_of_d4rl_are_known() -> None:
    assert len(DATASETS) == 155
    assert len({path for path, _ in DATASETS.values()}) == 155
    assert all(sha is None or len(sha) == 64 for _, sha in DATASETS.values())


@pytest.mark.parametrize(
    ("id", "path", "limit"),
    [
        ("maze2d-open-v0", "maze2d/maze2d-open-sparse", 150),
        ("maze2d-eval-medium-v1", "maze2d/maze2d-eval-medium-sparse-v1", 600),
        ("maze2d-eval-umaze-dense-v1", "maze2d/maze2d-eval-umaze-dense-v1", 300),
        ("minigrid-fourrooms-v0", "minigrid/minigrid4rooms", 50),
        ("minigrid-fourrooms-random-v0", "minigrid/minigrid4rooms_random", 50),
        ("pen-human-v0", "hand_dapg/pen-v0_demos_clipped", 200),
        ("hammer-cloned-v0", "hand_dapg/hammer-demos-v0-bc-combined", 200),
        ("door-expert-v0", "hand_dapg/door-v0_expert_clipped", 200),
        ("relocate-cloned-v1", "hand_dapg_v1/relocate-cloned-v1", 200),
        ("halfcheetah-medium-replay-v0", "gym_mujoco/halfcheetah_mixed", 1_000),
        ("walker2d-medium-replay-v0", "gym_mujoco/walker_mixed", 1_000),
        ("walker2d-medium-expert-v0", "gym_mujoco/walker2d_medium_expert", 1_000),
        ("ant-random-expert-v0", "gym_mujoco/ant_random_expert", 1_000),
        ("hopper-full-replay-v1", "gym_mujoco_v1/hopper_full_replay-v1", 1_000),
        ("antmaze-umaze-v0", "ant_maze_new/Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse", 700),
        ("flow-ring-controller-v0", "flow/flow-ring-v0-idm", 500),
        ("flow-merge-random-v0", "flow/flow-merge-v0-random", 750),
        ("carla-lane-v0", "carla/carla_lane_follow_flat-v0", 250),
        ("carla-town-v0", "carla/carla_town_subsamp_flat-v0", 1_000),
        ("carla-town-full-v0", "carla/carla_town_flat-v0", 1_000),
        ("bullet-ant-medium-replay-v0", "bullet/bullet-ant_medium_replay", 1_000),
        ("bullet-maze2d-large-v0", "bullet/bullet-maze2d-large-sparse", 800),
    ],
)
def test_an_id_has_its_address_and_time_limit(id: str, path: str, limit: int) -> None:
    assert DATASETS[id][0] == f"{path}.hdf5"
    assert find_time_limit(id) == limit


def test_an_environment_is_named_without_its_dataset() -> None:
    assert name_environment("ant-random-expert-v0") == "ant"
