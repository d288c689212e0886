"""D4RL's datasets by name: where they lie, their checksums, and the file of one on this host, fetched once."""

from __future__ import annotations

import hashlib
import re
import secrets
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.atomic import explain_errors, publish
from pipelines.files.locks import hold_lock
from pipelines.files.user_cache import cache_home
from pipelines.nearest import did_you_mean

_PIECE = 1 << 20
_TIMEOUT_SECONDS = 30.0
SITE = "http://rail.eecs.berkeley.edu/datasets/offline_rl"

# SHA-256 of the files at SITE, as TensorFlow Datasets lists them; None: listed nowhere.
_MUJOCO = {
    "ant-expert": "fa22531ca79ea051006fa48bb652120d2e12c813919c530369a03c2688311b0f",
    "ant-full-replay": "b95b0a7f34b1d5d1bedfded0f8e9cfc508b59de83cd4cbfb65b18dbd5056f26c",
    "ant-medium": "461c03b9f70f40d66b47608a92965e4ef3642bd9cdb1320d10acc92754167137",
    "ant-medium-expert": "8cfb64e62d8944b5d9dada5f0cfc13a295fafe0c6ba58b778e32ebf16c95aef1",
    "ant-medium-replay": "844c4e5743ef51091f2106a3570b257fb149032c4743f8a5f02f40adc3b42a46",
    "ant-random": "93cc10893eed2b8e17f81d1aa51dc23d27c5ca101a3804249f6bd038c6f06055",
    "halfcheetah-expert": "d9fe53bb994eb1e20a99b4fa3412cd76a1bb7966a7ff55e0fcbdd6081bd2965f",
    "halfcheetah-full-replay": "27fdf7ea86e5a2cbd24d611ae9e703c86ec2e8e52823abc69dd9af6afb3a36c0",
    "halfcheetah-medium": "41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0",
    "halfcheetah-medium-expert": "015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06",
    "halfcheetah-medium-replay": "48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683",
    "halfcheetah-random": "25407aef85b5d16c0f36b4149341edb4acc6a9e88c1db529b2de19e7464874ba",
    "hopper-expert": "01aa219a5f8eea5e639eccdc636ec2bf40e317159a95cf4bf6e985f16909941b",
    "hopper-full-replay": "56baf95963c51c1e964049a974566c50ba80f289390565523e60c0ba83e0982e",
    "hopper-medium": "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0",
    "hopper-medium-expert": "9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26",
    "hopper-medium-replay": "e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b",
    "hopper-random": "63103ef7059db4c0819bd054f4e83ff339030b50bcdb46bdbe50385f234b5054",
    "walker2d-expert": "2985dc3d436a8baa10e8f43f946fe1d7c6337a4e4fbc65def70618093b18c59a",
    "walker2d-full-replay": "f2720f9d27b2acef6ec9a7d9ad3b80b6c2078ad4467cee668a81e3b3c80bcf2a",
    "walker2d-medium": "cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda",
    "walker2d-medium-expert": "6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04",
    "walker2d-medium-replay": "e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db",
    "walker2d-random": "4e863bb6090cf4a461548bd470564b32f1ae5b32ef3085f816b2ede7f092e7fa",
}
_ADROIT = {
    "door-cloned": "1f6a60ecc4d2a2e5c02f41dd3412be61bb265a33dcf120ceee9e9682d4fe4d48",
    "door-expert": "66df4cd4e0a1e0b72ea72653ce088e29ecbfa99bac3cd2b52e64092e9a0aaab4",
    "door-human": "f9691288c3ddf2b4e7b31bdae0d8444b80ba035515495f8a902d60c43ee09370",
    "hammer-cloned": "e48d75b159bdd72f51d3f01448d3eca4d38275714e11e995c14a36f6cf159db3",
    "hammer-expert": "1c069a0f6e4852493023c77dc3b3a12d8d5ac2e3a034827fea3ab8a161e7185f",
    "hammer-human": "3e42f3f49b5c92a901601dfe867c6c62a9651cbe79f6760ec8b402a15816a498",
    "pen-cloned": "6d1a982cee1950501bedebbddedbcbb377e6284d379986c83abac8a6c0be0c22",
    "pen-expert": "3791b8ca6a802061770af2977c051ac3ae261488210ce73788760a5b8308f374",
    "pen-human": "209e345b2150b633f30a11612612c60f49e941f127ce6c4dc0cd790501c46f9f",
}
_ANTMAZE = {
    "umaze": (
        "u-maze_noisy_multistart_False_multigoal_False",
        "5ef15257771c50ef4d23c7de001750e96c8bb5d9b6a5e4a821dcfb3065fbd130",
    ),
    "umaze-diverse": (
        "u-maze_noisy_multistart_True_multigoal_True",
        "c771dd63963cd7d9f55f24a6d809064f6b82250a6aeac4c9d13f9a1d06e8c932",
    ),
    "medium-play": ("big-maze_noisy_multistart_True_multigoal_False", None),
    "medium-diverse": (
        "big-maze_noisy_multistart_True_multigoal_True",
        "ad9dcbac05d1f8744a7a216083f513662f43f64f28a4a5eb225e9811902dfae7",
    ),
    "large-play": (
        "hardest-maze_noisy_multistart_True_multigoal_False",
        "6d353df2457829925d7f9d4b0215587469908bd57478ea76f16417cfa944f471",
    ),
    "large-diverse": (
        "hardest-maze_noisy_multistart_True_multigoal_True",
        "84f775eb7956ea9cc766704710dc520a8ab357adc7522ade47f556f0e335e284",
    ),
}
_MAZE2D = {
    "open-v0": "open-sparse",
    "open-dense-v0": "open-dense",
    **{f"{size}-v1": f"{size}-sparse-v1" for size in ("umaze", "medium", "large")},
    **{f"{size}-dense-v1": f"{size}-dense-v1" for size in ("umaze", "medium", "large")},
}
_KITCHEN = {
    "complete": "mini_kitchen_microwave_kettle_light_slider-v0",
    "partial": "kitchen_microwave_kettle_light_slider-v0",
    "mixed": "kitchen_microwave_kettle_bottomburner_light-v0",
}
_V0_MUJOCO = {
    f"{env}-{kind}": f"{'walker' if (env, theirs) == ('walker2d', 'mixed') else env}_{theirs}"
    for env in ("ant", "halfcheetah", "hopper", "walker2d")
    for kind, theirs in (
        *((name, name.replace("-", "_")) for name in ("random", "medium", "expert", "medium-expert")),
        ("medium-replay", "mixed"),
    )
} | {"ant-random-expert": "ant_random_expert"}
_V0_ADROIT = {
    f"{task}-{kind}": file.format(task=task)
    for task in ("door", "hammer", "pen", "relocate")
    for kind, file in (
        ("human", "{task}-v0_demos_clipped"),
        ("cloned", "{task}-demos-v0-bc-combined"),
        ("expert", "{task}-v0_expert_clipped"),
    )
}
_OTHERS = {
    **{f"maze2d-eval-{size}-v1": f"maze2d/maze2d-eval-{size}-sparse-v1" for size in ("umaze", "medium", "large")},
    **{f"maze2d-eval-{size}-dense-v1": f"maze2d/maze2d-eval-{size}-dense-v1" for size in ("umaze", "medium", "large")},
    "minigrid-fourrooms-v0": "minigrid/minigrid4rooms",
    "minigrid-fourrooms-random-v0": "minigrid/minigrid4rooms_random",
    **{
        f"flow-{road}-{kind}-v0": f"flow/flow-{road}-v0-{theirs}"
        for road in ("ring", "merge")
        for kind, theirs in (("random", "random"), ("controller", "idm"))
    },
    "carla-lane-v0": "carla/carla_lane_follow_flat-v0",
    "carla-town-v0": "carla/carla_town_subsamp_flat-v0",
    "carla-town-full-v0": "carla/carla_town_flat-v0",
    **{
        f"bullet-{env}-{kind}-v0": f"bullet/bullet-{env}_{kind.replace('-', '_')}"
        for env in ("ant", "halfcheetah", "hopper", "walker2d")
        for kind in ("random", "medium", "expert", "medium-expert", "medium-replay")
    },
    **{
        f"bullet-maze2d-{size}-v0": f"bullet/bullet-maze2d-{size}-sparse"
        for size in ("open", "umaze", "medium", "large")
    },
}

# Name -> (path below SITE, SHA-256).
DATASETS: dict[str, tuple[str, str | None]] = {
    **{f"{name}-v2": (f"gym_mujoco_v2/{name.replace('-', '_')}-v2.hdf5", sha) for name, sha in _MUJOCO.items()},
    **{f"{name}-v1": (f"hand_dapg_v1/{name}-v1.hdf5", sha) for name, sha in _ADROIT.items()},
    **{
        f"antmaze-{name}-v2": (f"ant_maze_v2/Ant_maze_{file}_sparse_fixed.hdf5", sha)
        for name, (file, sha) in _ANTMAZE.items()
    },
    **{f"maze2d-{name}": (f"maze2d/maze2d-{file}.hdf5", None) for name, file in _MAZE2D.items()},
    **{f"kitchen-{name}-v0": (f"kitchen/{file}.hdf5", None) for name, file in _KITCHEN.items()},
    **{f"{name}-v1": (f"gym_mujoco_v1/{name.replace('-', '_')}-v1.hdf5", None) for name in _MUJOCO},
    **{
        f"relocate-{kind}-v1": (f"hand_dapg_v1/relocate-{kind}-v1.hdf5", None) for kind in ("cloned", "expert", "human")
    },
    **{f"{name}-v0": (f"gym_mujoco/{file}.hdf5", None) for name, file in _V0_MUJOCO.items()},
    **{f"{name}-v0": (f"hand_dapg/{file}.hdf5", None) for name, file in _V0_ADROIT.items()},
    **{
        f"antmaze-{name}-v0": (f"ant_maze_new/Ant_maze_{file}_sparse.hdf5", None)
        for name, (file, _) in _ANTMAZE.items()
    },
    **{name: (f"{file}.hdf5", None) for name, file in _OTHERS.items()},
}
_KINDS = (
    "random-expert|full-replay|medium-replay|medium-expert|medium|random|expert|human|cloned|mixed|partial|complete"
)
_FAMILY = re.compile(rf"(?P<env>[a-z][a-z0-9]*)[-_](?:{_KINDS.replace('-', '[-_]')})(?:[-_]v\d+)?")


_SIZES = (("open", 150), ("umaze", 300), ("medium", 600), ("large", 800))
# Time limits of D4RL's environments, in steps; first the names that begin longer.
_LIMITS = {
    **dict.fromkeys(("halfcheetah", "hopper", "walker2d", "ant"), 1_000),
    **{f"antmaze-{size}": steps for size, steps in (("umaze", 700), ("medium", 1_000), ("large", 1_000))},
    **{f"{maze}-{size}": steps for maze in ("maze2d", "maze2d-eval", "bullet-maze2d") for size, steps in _SIZES},
    **dict.fromkeys(("bullet-halfcheetah", "bullet-hopper", "bullet-walker2d", "bullet-ant"), 1_000),
    **{"kitchen": 280, "pen-human": 200, "pen": 100, "hammer-human": 600, "hammer": 200},
    **{"door-human": 300, "door": 200, "relocate-human": 500, "relocate": 200},
    **{"minigrid-fourrooms": 50, "flow-ring": 500, "flow-merge": 750, "carla-lane": 250, "carla-town": 1_000},
}


def find_time_limit(label: str) -> int | None:
    """Find the time limit of the environment of a D4RL dataset; None if `label` does not name one."""
    name = label.replace("_", "-").lower()
    if name not in DATASETS and _FAMILY.fullmatch(label) is None and not name.startswith(("antmaze-", "maze2d-")):
        return None
    return next((steps for start, steps in _LIMITS.items() if name == start or name.startswith(f"{start}-")), None)


def find_file(place: str, listener: Listener = silent) -> Path:
    """Find the file that `place` names: a path, a folder with one HDF5 file, or a dataset's name, which is fetched.

    InputMissing where there is neither, or where it cannot be fetched.
    """
    path = Path(place)
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in (".hdf5", ".h5"))
        if len(inside) != 1:
            raise InputMissing(f"'{path}' has {len(inside)} HDF5 files", hint="name one of them")
        return inside[0]
    if path.exists() or place not in DATASETS:
        if not path.exists() and not path.suffix:
            hint = did_you_mean(place, DATASETS, prefix="d4rl:", otherwise="give the path of an HDF5 file")
            raise InputMissing(f"no file '{place}', and no dataset of that name", hint=hint)
        return path
    below, sha256 = DATASETS[place]
    path = cache_home() / "datasets" / f"{place}.hdf5"
    if path.is_file():
        return path
    with explain_errors(f"write '{path.parent}' (AMAGO_CACHE names another place)"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f".{path.name}.lock")):  # one process of a host fetches, the others wait
        if not path.is_file():
            _fetch(f"{SITE}/{below}", path, sha256, listener)
    return path


def name_environment(label: str) -> str:
    """Map `hopper_medium-v2` to "hopper", D4RL's name of the environment; return any other label as it is."""
    found = _FAMILY.fullmatch(label)
    return found["env"] if found else label


def _fetch(url: str, path: Path, sha256: str | None, listener: Listener) -> None:
    """Fetch a file to a temporary name, check it, and rename it.

    InputMissing if it cannot be reached; IntegrityError if its SHA-256 is another, or it is shorter than announced.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    digest, done = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            while piece := answer.read(_PIECE):
                with explain_errors(f"write '{part}'"), part.open("ab") as file:
                    file.write(piece)
                digest.update(piece)
                done += len(piece)
                listener(Progress(stage=f"fetch {path.name}", done=done, total=size or None, unit="B"))
        if done < size:
            raise IntegrityError(f"'{url}' ended after {done:,} of {size:,} bytes", hint="repeat the command")
        found = digest.hexdigest()
        if sha256 is not None and found != sha256:
            raise IntegrityError(
                f"what '{url}' gave is not the file that was published (SHA-256 {found}, {sha256} expected)",
                hint="repeat the command, or fetch it yourself and give its path",
            )
        if sha256 is None:
            listener(Notice(text=f"{path.name}: no checksum of it is known; its SHA-256 is {found}", level="warning"))
        with explain_errors(f"write '{path}'"):
            publish(part, path)
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = error if isinstance(error, HTTPError) else getattr(error, "reason", None) or error
        raise InputMissing(
            f"cannot fetch '{url}': {reason}", hint=f"fetch it elsewhere and give its path, or put it at '{path}'"
        ) from error
    finally:
        part.unlink(missing_ok=True)
