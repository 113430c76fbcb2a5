"""Answers to problems of mathematics, right, nearly right and wrong, as models write them."""

from __future__ import annotations

from random import Random

FORMS = (
    "{a}",
    "-{a}",
    "{a}.0",
    "{a}.5",
    "0.{a}",
    "{a}/{b}",
    "{a}\\%",
    "{a},000",
    r"\frac{{{a}}}{{{b}}}",
    r"-\frac{{{a}}}{{{b}}}",
    r"\dfrac{a}{b}",
    r"{a}\frac{{1}}{{{b}}}",
    r"{a}\sqrt{{{b}}}",
    r"\sqrt{{{a}}}",
    r"\sqrt[3]{{{a}}}",
    r"\frac{{\sqrt{{{a}}}}}{{{b}}}",
    r"\frac{{{a} + \sqrt{{{b}}}}}{{2}}",
    r"{a}\pi",
    r"\frac{{{a}\pi}}{{{b}}}",
    "{a}^{b}",
    "{a}^{{-{b}}}",
    "{a} \\cdot 10^{{{b}}}",
    "{a} \\times {b}",
    "e^{{{a}}}",
    r"\log_{{{a}}} {b}",
    r"\ln {a}",
    "{a}!",
    r"\binom{{{a}}}{{{b}}}",
    "{a}i",
    "{a} + {b}i",
    "{x}",
    "{a}{x}",
    "{x} + {a}",
    "{a} + {x}",
    "{x}^2 + {a}{x} - {b}",
    "{x}^2 - {b} + {a}{x}",
    "({x} + {a})({x} - {b})",
    "({x} - {b})({x} + {a})",
    "({x} + {a})^2",
    "{x}^2 + {a}{x} + {a}{x} + {a}^2",
    r"\frac{{{x} + {a}}}{{{x} - {b}}}",
    r"\frac{{{x}^2 - {a}^2}}{{{x} - {a}}}",
    r"\frac{{{a}}}{{{x}}}",
    r"\sqrt{{{x}^2 + {a}}}",
    r"\sqrt{{{x}^2}}",
    "|{x}|",
    r"\sin({a}{x})",
    r"\sin^2 {x} + \cos^2 {x}",
    r"{a}\cos {x}",
    "{a}e^{{{x}}}",
    "2^{{{x} + {a}}}",
    "{x} = {a}",
    "{x} = {a} = {b}",
    "{x} + {a} = {b}",
    "y = {a}{x} + {b}",
    "f({x}) = {a}{x} + {b}",
    "{x} < {a}",
    r"{a} > {x}",
    r"{x} \le {a}",
    r"{b} < {x} < {a}",
    "({a}, {b})",
    "[{a}, {b}]",
    "({a}, {b}]",
    r"(-\infty, {a})",
    r"(-\infty, {a}) \cup ({b}, \infty)",
    r"\{{{a}, {b}\}}",
    "{a}, {b}",
    "{a} and {b}",
    r"\pm {a}",
    r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
    r"\begin{{bmatrix}} {a} & {b} \\ 0 & 1 \end{{bmatrix}}",
    r"\text{{{name}}}",
    "{name}",
    r"{a}\text{{ cm}}",
    r"{a}^\circ",
    r"\${a}",
    r"\infty",
    r"\emptyset",
    r"\frac{{{a}}}{{0}}",
    r"\frac{{{a}",
    "",
)
AROUND = (
    r"\boxed{{{answer}}}",
    "The answer is ${answer}$.",
    "First $x + 1 = 7$, then ${answer}$",
    r"\[ {answer} \]",
    "Final answer is {answer}. I hope it is correct.",
    "answer: {answer}",
    "We get {answer}",
    r"\boxed{{7}}, no: \boxed{{{answer}}}",
    r"${answer}$\%",
    r"so \boxed{{{answer}}} or \boxed{{??}}",
)
NUMBERS = (1, 2, 3, 4, 6, 8, 9, 12, 16)


def answer(random: Random) -> str:
    """Return an answer, of so few forms and numbers that two are often equal."""
    values = {"a": random.choice(NUMBERS), "b": random.choice(NUMBERS), "x": random.choice("xxxyn")}
    return random.choice(FORMS).format(**values, name=random.choice(("yes", "No", "A", "even")))


def pair(random: Random) -> tuple[str, str]:
    """Return what is right, marked as mathematics, and a completion."""
    gold = answer(random)
    kind = random.random()
    if kind < 0.2:
        given = gold
    elif kind < 0.6:  # the same form, with other numbers
        state = Random(random.random())
        form = random.choice(FORMS)
        gold, given = (
            form.format(a=state.choice(NUMBERS), b=state.choice(NUMBERS), x="x", name="yes") for _ in range(2)
        )
    else:
        given = answer(random)
    return f"\\boxed{{{gold}}}", random.choice(AROUND).format(answer=given)
