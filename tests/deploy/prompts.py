"""Sixty prompts of three kinds, written for the tests."""

from __future__ import annotations

from typing import Final

_NUMBERS: Final = ((7, 12), (15, 4), (23, 9), (31, 6), (48, 5))
_TOPICS: Final = ("rivers", "bicycles", "bread", "bridges", "the moon")
_TASKS: Final = (
    "reverses a list",
    "counts the words in a string",
    "checks whether a number is prime",
    "merges two dictionaries",
    "finds the largest number in a file",
)

PROMPTS: Final = (
    *(f"What is {a} plus {b}? Explain each step." for a, b in _NUMBERS),
    *(f"Tom has {a} boxes with {b} pens each. How many pens are there?" for a, b in _NUMBERS),
    *(f"A ticket costs {b} euros. What do {a} tickets cost?" for a, b in _NUMBERS),
    *(f"Is {a * b} divisible by {b}? Say why." for a, b in _NUMBERS),
    *(f"Write a Python function that {task}." for task in _TASKS),
    *(f"Write a JavaScript function that {task}." for task in _TASKS),
    *(f"Explain step by step how a program {task}." for task in _TASKS),
    *(f"Write a unit test for a function that {task}." for task in _TASKS),
    *(f"Write three sentences about {topic}." for topic in _TOPICS),
    *(f"Why do people like {topic}?" for topic in _TOPICS),
    *(f"Give me five facts about {topic}." for topic in _TOPICS),
    *(f"Write a short poem about {topic}." for topic in _TOPICS),
)


def some(number: int) -> tuple[str, ...]:
    """``number`` prompts spread over the kinds."""
    return PROMPTS[:: max(len(PROMPTS) // number, 1)][:number]
