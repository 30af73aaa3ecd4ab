"""2048 as text: slide the board up, down, left or right; equal tiles merge. The first tile of 64 wins by default."""

import random
from collections.abc import Generator
from typing import Any

MOVES = ("up", "down", "left", "right")
Board = list[list[int]]


class Game2048:
    """Gives the share of the way from the first board to the target tile, counted in doublings."""

    def __init__(self, games: int = 200, size: int = 4, target: int = 64, moves: int = 60) -> None:
        self.games, self.size, self.target, self.moves = games, size, target, moves

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per game; its first board follows from its number."""
        return [
            {"prompt": [{"role": "user", "content": self._rules() + shown(self._first(n))}], "case_idx": n}
            for n in range(self.games)
        ]

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        """Takes moves until the target is reached, no move is left, or three replies were not moves."""
        chance, board, message, wrong = random.Random(seed), self._first(case_idx), None, 0
        first = highest(board).bit_length()
        for _ in range(self.moves):
            reply = (yield message).strip().lower()
            after = slid(board, reply) if reply in MOVES else board
            if after == board:
                wrong += 1
                message = f"That is no move here. Answer with one of: {', '.join(possible(board))}.\n{shown(board)}"
                if wrong == 3:
                    break
                continue
            board = after
            if highest(board) >= self.target:
                break
            place_tile(board, chance)
            if not possible(board):
                break
            message = shown(board)
        return min(1.0, (highest(board).bit_length() - first) / (self.target.bit_length() - first))

    def _first(self, number: int) -> Board:
        chance, board = random.Random(number), [[0] * self.size for _ in range(self.size)]
        place_tile(board, chance)
        place_tile(board, chance)
        return board

    def _rules(self) -> str:
        return (
            f"Play 2048 until a tile is {self.target}. Equal tiles that meet merge into one of twice the value. Answer"
            f" each board with one word: {', '.join(MOVES)}.\n"
        )


def slid(board: Board, move: str) -> Board:
    """The board after a move, before a new tile."""
    turned = [list(row) for row in zip(*board, strict=True)] if move in ("up", "down") else board
    rows = [merged(row[::-1])[::-1] if move in ("down", "right") else merged(row) for row in turned]
    return [list(row) for row in zip(*rows, strict=True)] if move in ("up", "down") else rows


def merged(row: list[int]) -> list[int]:
    """A row after it slid to its beginning."""
    tiles, made = [tile for tile in row if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        made.append(tile)
    return made + [0] * (len(row) - len(made))


def possible(board: Board) -> list[str]:
    """The moves that change the board."""
    return [move for move in MOVES if slid(board, move) != board]


def place_tile(board: Board, chance: random.Random) -> None:
    """Put a 2, or one time in ten a 4, on a free place."""
    free = [(row, column) for row, tiles in enumerate(board) for column, tile in enumerate(tiles) if not tile]
    row, column = chance.choice(free)
    board[row][column] = 4 if chance.random() < 0.1 else 2


def highest(board: Board) -> int:
    """The largest tile."""
    return max(map(max, board))


def shown(board: Board) -> str:
    """The board as text."""
    return "\n".join(" ".join(f"{tile or '.':>3}" for tile in row) for row in board)
