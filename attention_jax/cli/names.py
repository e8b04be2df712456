"""What the report calls things, and their colours: one name and one colour per mixer, in text, tables and plots."""

MIXERS = {
    "attention": "attention",
    "elman": "Elman RNN",
    "gru": "GRU",
    "lstm": "LSTM",
    "linear": "linear recurrence",
}
LAYERS = {
    "attention 1 head": "attention, 1 head",
    "attention 8 heads": "attention, 8 heads",
    "gru": "GRU",
    "lstm": "LSTM",
    "flax gru": "GRU of Flax",
    "flax lstm": "LSTM of Flax",
    "linear": "linear recurrence, scan",
    "linear associative": "linear recurrence, associative scan",
}
# Told apart by people with any colour vision; the second of each pair is for a dark page.
COLOURS = {
    "attention": ("#0069b4", "#62b5f0"),
    "gru": ("#d1500b", "#ff9256"),
    "linear": ("#00866a", "#3fcaa2"),
    "lstm": ("#b14f8d", "#e79ac6"),
    "elman": ("#8f6b00", "#e2b93b"),
}


def mixer_of(layer: str) -> str:
    """The mixer that a timed layer belongs to.

    Example:
        >>> mixer_of("attention 8 heads"), mixer_of("flax gru"), mixer_of("linear associative")
        ('attention', 'gru', 'linear')
    """
    return next(mixer for mixer in MIXERS if mixer in layer.split())


def count(number: float) -> str:
    """A whole number with thousands set apart.

    Example:
        >>> count(1234567)
        '1,234,567'
    """
    return f"{round(number):,}"


def figure(number: float, digits: int = 3) -> str:
    """A number in so many digits, never in powers of ten.

    Example:
        >>> figure(0.06634), figure(55.84), figure(1234.5), figure(130.2, 2)
        ('0.0663', '55.8', '1,234', '130')
    """
    return count(number) if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def listed(words: list[str]) -> str:
    """Words as a list in a sentence.

    Example:
        >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def size(number_of_bytes: float) -> str:
    """A size in the unit that reads best.

    Example:
        >>> size(812), size(471_022), size(3_100_000)
        ('812 bytes', '471 kB', '3.1 MB')
    """
    if number_of_bytes < 1000:
        return f"{number_of_bytes:.0f} bytes"
    return f"{number_of_bytes / 1e3:.0f} kB" if number_of_bytes < 1e6 else f"{number_of_bytes / 1e6:.1f} MB"


def percent(share: float) -> str:
    """A share of 1; never rounded up to 100 % or down to 0 %.

    Example:
        >>> percent(1.0), percent(0.9997), percent(0.164)
        ('100 %', '99.9 %', '16 %')
    """
    if 0.995 <= share < 1 or 0 < share < 0.005:
        return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
    return f"{100 * share:.0f} %"


def start(words: str) -> str:
    """Words as the start of a sentence.

    Example:
        >>> start("attention and GRU")
        'Attention and GRU'
    """
    return words[:1].upper() + words[1:]
