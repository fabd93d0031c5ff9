"""The demo's prompts: ordinary questions, four each of mathematics, code and conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question under a short name."""

    name: str
    text: str


PROMPTS: Final = (
    Prompt(
        name="math: bakery",
        text="A bakery fills 6 trays with 14 rolls each and sells 57 rolls before noon. "
        "How many rolls are left? Show your steps.",
    ),
    Prompt(
        name="math: cyclist",
        text="A cyclist rides 18 km in the first hour and 15 km in each of the next two hours. "
        "What is her average speed? Explain briefly.",
    ),
    Prompt(
        name="math: discount",
        text="A coat costs 80 euros. It is reduced by 25 percent, and then by another 10 euros. "
        "What does it cost now? Go step by step.",
    ),
    Prompt(
        name="math: garden",
        text="A rectangular garden is 12 metres long and 7 metres wide. What are its area and "
        "the length of a fence around it?",
    ),
    Prompt(
        name="code: palindrome",
        text="Write a Python function that tells whether a string is a palindrome, ignoring case.",
    ),
    Prompt(
        name="code: count words",
        text="Write a Python function that counts how often each word occurs in a text and "
        "returns a dictionary.",
    ),
    Prompt(
        name="code: fizzbuzz",
        text="Write a Python program that prints the numbers from 1 to 30, with Fizz for "
        "multiples of 3, Buzz for multiples of 5 and FizzBuzz for both.",
    ),
    Prompt(
        name="code: largest",
        text="Write a Python function that returns the two largest numbers of a list without "
        "sorting it. Explain how it works.",
    ),
    Prompt(
        name="chat: sleep",
        text="I have trouble falling asleep on Sundays. Give me three simple tips.",
    ),
    Prompt(
        name="chat: seasons",
        text="Explain to a ten-year-old why there are seasons.",
    ),
    Prompt(
        name="chat: letter",
        text="Write a short, friendly note to my neighbours saying that I will have guests on "
        "Saturday evening and that it may get a little loud.",
    ),
    Prompt(
        name="chat: tea",
        text="What is the difference between green tea and black tea?",
    ),
)
