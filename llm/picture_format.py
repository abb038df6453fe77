"""How pictures that are tokens of a prompt are written in it. Imports no torch."""

import re
from dataclasses import dataclass
from typing import Final

Grid = tuple[int, int]  # rows and columns of the squares that a picture is cut into; (0, 0): it is not cut

FRAME: Final = "<fake_token_around_image>"  # in Idefics3 and SmolVLM
IN_PICTURES: Final = re.compile(rf"{FRAME}|<row_\d+_col_\d+>|<global-img>")  # tokens in the text of a picture there


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFormat:
    """The text that stands for a picture: `token` as often as the model has embeddings of it.

    LLaVA (Liu et al., 2023) has nothing else. Idefics3 (Laurençon et al., 2024) and SmolVLM cut large pictures into
    squares; each is introduced by the token `frame` and its place, and the whole picture follows, also as a square.
    """

    token: str
    token_id: int
    tokens_each: int  # of each square
    frame: str = ""  # "": pictures are not cut
    most_squares: int = 1  # of the largest grid, with the whole picture

    @property
    def most_tokens(self) -> int:
        """About the most tokens of one picture."""
        return self.most_squares * (self.tokens_each + 8)

    def text(self, grid: Grid) -> str:
        """The text of a picture; only the model's template may write it into a prompt."""
        square = self.token * self.tokens_each
        if not self.frame:
            return square
        rows, columns = grid
        lines = [
            "".join(f"{self.frame}<row_{row}_col_{column}>{square}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        whole = f"{self.frame}<global-img>{square}{self.frame}"
        return "".join(lines) + ("\n" if lines else "") + whole


def num_squares(grid: Grid) -> int:
    """The squares of a picture: those of its grid, and the whole picture."""
    return grid[0] * grid[1] + 1
