"""Small pictures in NumPy: rectangles, discs, lines and letters on a canvas of RGB bytes.

Positions are (x, y) in pixels from the top left corner, as floats: edges are smooth.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_Color = tuple[int, int, int]

INK: _Color = (30, 41, 59)
SLATE: _Color = (71, 85, 105)
GREY: _Color = (148, 163, 184)
PALE: _Color = (226, 232, 240)
PAPER: _Color = (248, 250, 252)
BLUE: _Color = (37, 99, 235)
SKY: _Color = (191, 219, 254)
WATER: _Color = (30, 58, 138)
GREEN: _Color = (22, 163, 74)
AMBER: _Color = (217, 119, 6)
GOLD: _Color = (250, 204, 21)
RED: _Color = (220, 38, 38)
PINK: _Color = (219, 39, 119)
TEAL: _Color = (20, 184, 166)
WHITE: _Color = (255, 255, 255)

GLYPH = (7, 5)  # rows and columns of a letter
_SPACING = 1
# The rows of each letter, two hexadecimal digits a row, of which the lowest five bits are pixels.
_GLYPHS = """
A 0E11111F111111 B 1E11111E11111E C 0E11101010110E D 1C12111111121C E 1F10101E10101F F 1F10101E101010
G 0E11101711110F H 1111111F111111 I 0E04040404040E J 0702020202120C K 11121418141211 L 1010101010101F
M 111B1515111111 N 11111915131111 O 0E11111111110E P 1E11111E101010 Q 0E11111115120D R 1E11111E141211
S 0F10100E01011E T 1F040404040404 U 1111111111110E V 11111111110A04 W 1111111515150A X 11110A040A1111
Y 1111110A040404 Z 1F01020408101F 0 0E11131519110E 1 040C040404040E 2 0E11010204081F 3 1F02040201110E
4 02060A121F0202 5 1F101E0101110E 6 0608101E11110E 7 1F010204080808 8 0E11110E11110E 9 0E11110F01020C
+ 0004041F040400 - 0000001F000000 . 00000000000C0C , 000000000C0408 : 000C0C000C0C00 / 00010204081000
= 00001F001F0000 % 18190204081303 ( 02040808080402 ) 08040202020408 # 0A0A1F0A1F0A0A _ 0000000000001F
? 0E110102040004 ! 04040404040004 < 02040810080402 > 08040201020408 * 00150E1F0E1500 ' 04040800000000
[ 0E08080808080E ] 0E02020202020E
"""
_WORDS = _GLYPHS.split()
_PIXELS = {
    name: np.array([[int(rows[2 * row : 2 * row + 2], 16) >> (4 - column) & 1 for column in range(GLYPH[1])]
                    for row in range(GLYPH[0])], dtype=bool)
    for name, rows in zip(_WORDS[::2], _WORDS[1::2], strict=True)
}  # fmt: skip


class Canvas:
    """A picture to draw on: `pixels` (height, width, 3) uint8."""

    def __init__(self, height: int, width: int, color: _Color = PAPER) -> None:
        self.pixels = np.empty((height, width, 3), dtype=np.uint8)
        self.pixels[:] = color

    def rectangle(self, left: float, top: float, right: float, bottom: float, color: _Color) -> None:
        """Fill a rectangle."""
        x, y = self._centers(left, top, right, bottom)
        inside = np.minimum(np.minimum(x - left, right - x), np.minimum(y - top, bottom - y))
        self._blend(left, top, inside + 0.5, color)

    def disc(self, x: float, y: float, radius: float, color: _Color) -> None:
        """Fill a disc."""
        box = x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1
        across, down = self._centers(*box)
        self._blend(box[0], box[1], radius - np.hypot(across - x, down - y) + 0.5, color)

    def ring(self, x: float, y: float, radius: float, width: float, color: _Color) -> None:
        """Draw a circle, `width` wide."""
        box = x - radius - width, y - radius - width, x + radius + width, y + radius + width
        across, down = self._centers(*box)
        apart = np.abs(np.hypot(across - x, down - y) - radius)
        self._blend(box[0], box[1], width / 2 - apart + 0.5, color)

    def line(self, x0: float, y0: float, x1: float, y1: float, width: float, color: _Color) -> None:
        """Draw a line with round ends."""
        box = min(x0, x1) - width, min(y0, y1) - width, max(x0, x1) + width, max(y0, y1) + width
        across, down = self._centers(*box)
        length = max((x1 - x0) ** 2 + (y1 - y0) ** 2, 1e-9)
        share = np.clip(((across - x0) * (x1 - x0) + (down - y0) * (y1 - y0)) / length, 0, 1)
        apart = np.hypot(across - x0 - share * (x1 - x0), down - y0 - share * (y1 - y0))
        self._blend(box[0], box[1], width / 2 - apart + 0.5, color)

    def triangle(self, *corners: tuple[float, float], color: _Color) -> None:
        """Fill a triangle between three points."""
        xs, ys = zip(*corners, strict=True)
        left, top = min(xs), min(ys)
        across, down = self._centers(left, top, max(xs), max(ys))
        inside = np.full(np.broadcast_shapes(across.shape, down.shape), np.inf)
        middle = sum(xs) / 3, sum(ys) / 3
        for (x0, y0), (x1, y1) in zip(corners, (*corners[1:], corners[0]), strict=True):
            side = np.array([y0 - y1, x1 - x0]) / max(np.hypot(x1 - x0, y1 - y0), 1e-9)
            side *= np.sign(side @ (middle[0] - x0, middle[1] - y0)) or 1.0  # inwards
            inside = np.minimum(inside, (across - x0) * side[0] + (down - y0) * side[1])
        self._blend(left, top, inside + 0.5, color)

    def text(self, text: str, x: float, y: float, color: _Color, *, scale: int = 1, middle: bool = False) -> None:
        """Write `text`, in capitals, from (x, y) on, the top left corner of its first letter; `middle`: around it."""
        shape = letters(text).repeat(scale, 0).repeat(scale, 1)
        if middle:
            x, y = round(x - shape.shape[1] / 2), round(y - shape.shape[0] / 2)
        left, top = int(x), int(y)
        shape = shape[max(-top, 0) :, max(-left, 0) :]
        here = self.pixels[max(top, 0) : max(top, 0) + shape.shape[0], max(left, 0) : max(left, 0) + shape.shape[1]]
        here[shape[: here.shape[0], : here.shape[1]]] = color

    def _centers(self, left: float, top: float, right: float, bottom: float) -> tuple[np.ndarray, np.ndarray]:
        """Return x (1, W) and y (H, 1) of the pixels' middles in a box, whose corner `_blend` takes."""
        columns = np.arange(int(np.floor(left)), int(np.ceil(right)) + 1)
        rows = np.arange(int(np.floor(top)), int(np.ceil(bottom)) + 1)
        return columns[None] + 0.5, rows[:, None] + 0.5

    def _blend(self, left: float, top: float, cover: np.ndarray, color: _Color) -> None:
        """Paint `color` where `cover` (H, W) is 1, and a share of it below that; what is off the canvas is cut off."""
        x, y = int(np.floor(left)), int(np.floor(top))
        cover = cover[max(-y, 0) :, max(-x, 0) :]
        here = self.pixels[max(y, 0) : max(y, 0) + cover.shape[0], max(x, 0) : max(x, 0) + cover.shape[1]]
        if here.size:
            share = np.clip(cover[: here.shape[0], : here.shape[1], None], 0, 1)
            here[:] = np.rint(here * (1 - share) + np.array(color) * share)


@lru_cache(maxsize=1024)
def letters(text: str) -> np.ndarray:
    """Write `text` in capitals as pixels (7, 6 n - 1), bool. A character that the font lacks becomes "?".

    >>> letters("ab").shape
    (7, 11)
    """
    rows, columns = GLYPH
    found = np.zeros((rows, max(len(text) * (columns + _SPACING) - _SPACING, 0)), dtype=bool)
    for place, letter in enumerate(text.upper()):
        if letter != " ":
            start = place * (columns + _SPACING)
            found[:, start : start + columns] = _PIXELS.get(letter, _PIXELS["?"])
    found.setflags(write=False)
    return found


def enlarge(picture: np.ndarray, least_width: int) -> np.ndarray:
    """Repeat the pixels of `picture` (H, W, 3) until it is `least_width` wide.

    >>> enlarge(np.zeros((2, 3, 3), np.uint8), 6).shape
    (4, 6, 3)
    """
    times = max(-(-least_width // picture.shape[1]), 1)
    return picture.repeat(times, 0).repeat(times, 1) if times > 1 else picture


def as_picture(values: np.ndarray) -> np.ndarray | None:
    """Convert one observed image to (H, W, 3) uint8: bytes of (H, W), (H, W, C) or (C, H, W), 8 pixels a side or more;
    of a stack of frames the last. None for anything else.
    """
    sides = [side for side in values.shape if side >= 8]
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or len(sides) < 2:
        return None
    if values.ndim == 2:
        values = values[..., None]
    if values.shape[-1] >= 8 and values.shape[0] < 8:
        values = np.moveaxis(values, 0, -1)
    channels = values.shape[-1]
    shown = values[..., -3:] if channels % 3 == 0 else values[..., -1:]
    return np.ascontiguousarray(np.broadcast_to(shown, (*values.shape[:2], 3)))


def draw_letters(picture: np.ndarray, *, width: int = 72) -> str:
    """Draw a picture (H, W, 3) as lines of text, for where there are no colours: the background is left empty."""
    shades = " .:-=+*#%@"
    columns = min(width, picture.shape[1])
    rows = max(round(picture.shape[0] * columns / picture.shape[1] / 2), 1)  # a letter is twice as high as wide
    light = _shrink(picture, rows, columns) @ np.array([0.299, 0.587, 0.114])
    if light.mean() > 127:
        light = 255 - light
    return "\n".join("".join(shades[int(value * 9.99 / 255)] for value in row).rstrip() for row in light)


def draw_blocks(picture: np.ndarray, *, width: int = 72) -> str:
    """Draw a picture (H, W, 3) as half blocks in 24-bit colours: two pixels a letter."""
    columns = min(width, picture.shape[1])
    rows = max(round(picture.shape[0] * columns / picture.shape[1] / 2), 1)
    shown = _shrink(picture, 2 * rows, columns).astype(int)
    lines = []
    for upper, lower in zip(shown[::2], shown[1::2], strict=True):
        cells = (f"\x1b[38;2;{r};{g};{b};48;2;{s};{t};{u}m▀" for (r, g, b), (s, t, u) in zip(upper, lower, strict=True))
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _shrink(picture: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Average the pixels that fall into each of (rows, columns) cells."""
    height, width = picture.shape[:2]
    row, column = (np.linspace(0, size, n + 1).astype(int) for size, n in ((height, rows), (width, columns)))
    row, column = (np.minimum(edges[:-1], size - 1) for edges, size in ((row, height), (column, width)))
    sums = np.add.reduceat(np.add.reduceat(picture.astype(np.float64), row, axis=0), column, axis=1)
    counts = np.diff(np.append(row, height))[:, None] * np.diff(np.append(column, width))[None]
    return sums / np.maximum(counts, 1)[..., None]
