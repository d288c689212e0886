"""Frames as games draw them, for measuring what images cost: nothing is read, everything is drawn from a generator."""

from __future__ import annotations

import numpy as np

TILE = 7  # pixels; 9 x 9 tiles are seen, 9 x 7 of them map, and one pixel of border is left


def tiles(rng: np.random.Generator, rows: int) -> np.ndarray:
    """(rows, 64, 64, 3) uint8: a walk through a world of textured tiles, with moving things and an inventory below."""
    textures = rng.integers(0, 256, (16, 1, 1, 3)) + rng.integers(-24, 25, (16, TILE, TILE, 3))
    textures = np.clip(textures, 0, 255).astype(np.uint8)
    coarse = rng.integers(0, 6, (16, 16)).repeat(4, 0).repeat(4, 1)  # lakes, woods, meadows
    world = np.where(rng.random(coarse.shape) < 0.1, rng.integers(0, 10, coarse.shape), coarse)
    frames = np.zeros((rows, 64, 64, 3), dtype=np.uint8)
    y, x = 30, 30
    things = rng.integers(0, 64, (60, 2))
    for frame in frames:
        dy, dx = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))[rng.integers(0, 5)]
        y, x = int(np.clip(y + dy, 4, 59)), int(np.clip(x + dx, 5, 58))
        moving = rng.random(len(things)) < 0.3
        things[moving] = np.clip(things[moving] + rng.integers(-1, 2, (moving.sum(), 2)), 0, 63)
        seen = world.copy()
        seen[things[:, 0], things[:, 1]] = 10 + np.arange(len(things)) % 4
        seen[y, x] = 15
        view = textures[seen[y - 3 : y + 4, x - 4 : x + 5]]  # (7, 9, TILE, TILE, 3)
        frame[:49, :63] = view.swapaxes(1, 2).reshape(7 * TILE, 9 * TILE, 3)
        for i in range(9):
            frame[49:56, i * TILE : (i + 1) * TILE] = textures[i + 1] if i < 4 + y % 4 else 0
    return frames


def stacked(rng: np.random.Generator, rows: int) -> np.ndarray:
    """(rows, 84, 84, 4) uint8: the last four grey frames of sprites that move over a still background."""
    background = np.kron(rng.integers(0, 4, (12, 12)) * 40, np.ones((7, 7))).astype(np.uint8)
    sprites = [(rng.integers(60, 256, (s, s)) * (rng.random((s, s)) < 0.8)).astype(np.uint8) for s in (5, 6, 8, 8, 10)]
    place = rng.uniform(0, 70, (len(sprites), 2))
    speed = rng.uniform(-3, 3, place.shape)
    single = np.empty((rows + 3, 84, 84), dtype=np.uint8)
    for t in range(rows + 3):
        single[t] = background
        single[t, 2:8, 4:36] = np.where(rng.integers(0, 2, (6, 32)) * (t // 40 % 2), 200, 0)  # a score
        for i, sprite in enumerate(sprites):
            a, b = place[i].astype(int)
            size = len(sprite)
            single[t, a : a + size, b : b + size] = np.maximum(single[t, a : a + size, b : b + size], sprite)
        place += speed
        bounced = (place < 0) | (place > 74)
        speed[bounced] *= -1
        place = np.clip(place, 0, 74)
    return np.stack([single[i : i + rows] for i in range(4)], -1)
