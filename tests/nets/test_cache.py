import pytest
import torch

from pipelines.nets.cache import KVCache


def cache(num_actors=3, ring=4, sink=0):
    return KVCache(num_layers=1, num_actors=num_actors, num_heads=1, head_size=1, ring=ring, sink=sink)


def write(memory, value):
    """Append `value` (N,) as key; returns what each actor then sees, sorted."""
    memory.begin_step()
    keys, _ = memory.append(0, value[:, None, None], -value[:, None, None])
    return [sorted(keys[i, 0, memory.visible_NS[i], 0].tolist()) for i in range(len(value))]


def test_each_actor_has_its_own_write_index():
    memory = cache()
    write(memory, torch.tensor([1.0, 1.0, 1.0]))
    write(memory, torch.tensor([2.0, 2.0, 2.0]))
    memory.reset(torch.tensor([False, True, False]))
    assert write(memory, torch.tensor([3.0, 3.0, 3.0])) == [[1, 2, 3], [3], [1, 2, 3]]
    assert memory.written_N.tolist() == [3, 1, 3]


def test_a_full_cache_gives_up_its_oldest_token():
    memory = cache(num_actors=2)
    for value in range(6):
        if value == 3:
            memory.reset(torch.tensor([False, True]))
        seen = write(memory, torch.full((2,), float(value)))
    assert seen == [[2, 3, 4, 5], [3, 4, 5]]


def test_the_first_tokens_stay_where_there_is_a_sink():
    memory = cache(num_actors=2, ring=3, sink=2)
    for value in range(8):
        if value == 5:
            memory.reset(torch.tensor([False, True]))
        seen = write(memory, torch.full((2,), float(value)))
    assert seen == [[0, 1, 5, 6, 7], [5, 6, 7]]


@pytest.mark.parametrize("sink", [0, 2])
def test_fill_leaves_what_steps_would(sink):
    tokens = torch.arange(1.0, 8.0)
    filled, stepped = (cache(ring=4 - sink, sink=sink) for _ in range(2))
    lengths = torch.tensor([7, 0, 3])
    filled.fill(0, tokens.view(1, 1, 7, 1).expand(3, 1, 7, 1), -tokens.view(1, 1, 7, 1).expand(3, 1, 7, 1), lengths)
    for step in range(7):
        stepped.begin_step()
        stepped.append(0, tokens[step].expand(3, 1, 1), -tokens[step].expand(3, 1, 1))
        stepped.written_N.copy_(torch.minimum(stepped.written_N, lengths))
    assert torch.equal(filled.written_N, lengths)
    expected = [[5, 6, 7, 9] if sink == 0 else [1, 2, 7, 9], [9], [1, 2, 3, 9]]
    for memory in (filled, stepped):
        assert write(memory, torch.full((3,), 9.0)) == expected
