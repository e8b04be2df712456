"""How an error reads: the function, the rule that was broken, the facts with their letters aligned, then the remedy."""

from collections.abc import Mapping


def explain(function: str, rule: str, facts: Mapping[str, object] | None = None, remedy: str = "") -> str:
    """The text of an error.

    Args:
        function: the public function that refuses.
        rule: the rule that was broken, a sentence.
        facts: what was given, by name; the values are aligned below each other.
        remedy: what to do instead, if there is one.

    Example:
        >>> print(explain("attention", "q and k must have the same width D.", {"q": (2, 3), "k": (2, 4)}))
        attention: q and k must have the same width D.
          q = (2, 3)
          k = (2, 4)
    """
    facts = facts or {}
    width = max(map(len, facts), default=0)
    lines = [f"{function}: {rule}", *(f"  {name:<{width}} = {value}" for name, value in facts.items())]
    if remedy:
        lines.append(remedy)
    return "\n".join(lines)
