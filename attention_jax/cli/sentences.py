"""What a report says in words. Every sentence is chosen by the numbers of the run, never by what was expected."""

import math
from typing import Any

from .names import LAYERS, MIXERS, count, figure, listed, percent, size, start

Results = dict[str, Any]
EQUAL_BITS = 0.03  # models closer than this are called equal: another seed moves them by about as much
LEARNED_RECALL = 0.95
NOT_LEARNED = "not learned in this budget"
PARTS = {  # in the order in which they are run
    "verify": "the check against other implementations",
    "train": "learning to predict text",
    "time": "time and order",
    "recall": "remembering pairs",
    "sample": "sample texts",
}


def opening(results: Results) -> list[str]:
    """The answer in a few sentences, for the top of the page."""
    parts = results["parts"]
    said = [
        *_answer_about_text(parts.get("train"), results["text"]),
        *_answer_about_order(parts.get("time")),
        *_answer_about_recall(parts.get("recall")),
    ]
    return said or ["There is no result yet."]


def state(results: Results) -> str:
    """What is missing from this report; empty where nothing is."""
    parts = results["parts"]
    missing = [PARTS[name] for name in PARTS if parts.get(name) is None]
    cut = [PARTS[name] for name in PARTS if parts.get(name) is not None and not parts[name]["finished"]]
    if not missing and not cut:
        return ""
    if results["interrupted"]:
        why = "was interrupted"
    else:
        why = "ran out of its budget" if results["finished"] else "is not over"
    said = f"This run {why}."
    said += f" Not reached: {listed(missing)}." if missing else ""
    return said + (f" Cut short: {listed(cut)}." if cut else "")


def agreement(verify: Results) -> list[str]:
    """Whether `attention` computes what it should."""
    checks = verify["checks"]
    wrong = [check for check in checks if not check["passed"]]
    others = listed(list(dict.fromkeys(check["against"] for check in wrong or checks)))
    if wrong:
        return [f"The numbers do not agree: {len(wrong)} of {len(checks)} checks differ, against {others}."]
    return [f"All {len(checks)} checks agree, in float64: against {others}."]


def learning(train: Results) -> list[str]:
    """Who predicts the text best, and who does not beat counting."""
    models = _judged(train)
    if not models:
        return ["No model got as far as an evaluation."]
    bigram, trigram = train["bigram_bits_per_byte"], train["trigram_bits_per_byte"]
    behind = [_name(model) for model in models if model["validation_bits_per_byte"] >= bigram]
    ahead = [_name(model) for model in models if model["validation_bits_per_byte"] < trigram]
    said = [best(models)]
    if behind:
        said.append(f"{start(listed(behind))}: {NOT_LEARNED}, no better than counting byte pairs ({bigram:.2f}).")
    if ahead:
        verbs = ("does better", "uses") if len(ahead) == 1 else ("do better", "use")
        said.append(
            f"{start(listed(ahead))} {verbs[0]} than counting byte triples ({trigram:.2f}), and so {verbs[1]} "
            "more than the last two bytes."
        )
    between = [_name(model) for model in models if trigram <= model["validation_bits_per_byte"] < bigram]
    if between:
        verb = "does" if len(between) == 1 else "do"
        said.append(
            f"{start(listed(between))} {verb} better than counting byte pairs ({bigram:.2f}), and not yet than "
            f"triples ({trigram:.2f})."
        )
    return said + _cost(models)


def best(models: list[Results]) -> str:
    """One sentence on the order of the models by bits per byte; lower is better."""
    ranked = sorted(models, key=lambda model: model["validation_bits_per_byte"])
    lowest = ranked[0]["validation_bits_per_byte"]
    if len(ranked) == 1:
        return f"{start(_name(ranked[0]))} needs {lowest:.2f} bits per unseen byte."
    level = [model for model in ranked if model["validation_bits_per_byte"] - lowest <= EQUAL_BITS]
    rest = [f"{_name(model)} ({model['validation_bits_per_byte']:.2f})" for model in ranked[len(level) :]]
    before = f", before {listed(rest)}" if rest else ""
    if len(level) == 1:
        return f"{start(_name(level[0]))} predicts best, with {lowest:.2f} bits per unseen byte{before}."
    names = listed([f"{_name(model)} ({model['validation_bits_per_byte']:.2f})" for model in level])
    return f"{start(names)} predict equally well, in bits per unseen byte{before}."


def order(time: Results) -> list[str]:
    """How the longest chain of dependent steps grows."""
    said = []
    for layer in dict.fromkeys(row["layer"] for row in time["chains"]):
        rows = [row for row in time["chains"] if row["layer"] == layer and row["direction"] == "forward"]
        if len(rows) > 1:
            bound = "" if all(row["exact"] for row in rows) else " (at least: the trips of a loop cannot be read off)"
            said.append(f"{start(LAYERS[layer])}: {growth(rows)}{bound}.")
    return said


def growth(rows: list[Results]) -> str:
    """How the steps of one layer grow from the first length to the last."""
    first, last = rows[0], rows[-1]
    if first["steps"] == last["steps"]:
        return f"{count(last['steps'])} steps at every length"
    longer, grown = last["length_tokens"] / first["length_tokens"], last["steps"] / first["steps"]
    kind = "in step with the length" if grown > longer / 2 else "far more slowly than the length"
    steps = f"{count(first['steps'])} steps at T = {count(first['length_tokens'])}"
    return f"{steps}, {count(last['steps'])} at T = {count(last['length_tokens'])}, growing {kind}"


def speed(time: Results) -> list[str]:
    """Who is faster at the shortest and the longest T, where a fair ratio exists."""
    said = [
        f"{start(LAYERS[check['layer']])}: no time is shown, since its numbers disagree with {check['against']}."
        for check in time["checks"]
        if not check["passed"]
    ]
    fair = [row for row in time["ratios"] if row["time_over_attention"] is not None]
    for direction, layer in dict.fromkeys((row["direction"], row["layer"]) for row in fair):
        rows = [row for row in fair if (row["direction"], row["layer"]) == (direction, layer)]
        ends = [
            f"{figure(row['time_over_attention'], 2)} times as long at T = {count(row['length_tokens'])}"
            for row in (rows if len(rows) == 1 else [rows[0], rows[-1]])
        ]
        said.append(f"{start(direction)}, {LAYERS[layer]} takes, beside attention with 8 heads, {listed(ends)}.")
    withheld = list(dict.fromkeys(LAYERS[row["layer"]] for row in time["ratios"] if row["time_over_attention"] is None))
    if withheld:
        said.append(
            f"No ratio is given for {listed(withheld)} where our layer was slower than Flax's in this run: it would "
            "flatter attention."
        )
    return said


def recall(part: Results) -> list[str]:
    """Who finds the pair again, by the share of right answers."""
    said = []
    for model in filter(lambda model: model["runs"], part["models"]):
        runs = model["runs"]
        learned = [run["pairs"] for run in runs if run["accuracy"] >= LEARNED_RECALL]
        if not learned:
            verdict = f": {NOT_LEARNED}"
        else:
            verdict = "" if len(learned) == len(runs) else f"; beyond {max(learned)} pairs {NOT_LEARNED}"
        shares = listed([f"{percent(run['accuracy'])} at {run['pairs']} pairs" for run in runs])
        said.append(f"{start(_name(model))} gives the right answer to {shares}{verdict}.")
    return [*said, f"Guessing gives {percent(part['chance_accuracy'])}."] if said else ["Nothing was measured."]


def _answer_about_text(train: Results | None, text: Results) -> list[str]:
    models = _judged(train) if train else []
    if not train or not models:
        return []
    sizes = [model["parameters"] for model in models]
    each = f" each (within {math.ceil(100 * (max(sizes) / min(sizes) - 1)) or 1} %)" if len(models) > 1 else ""
    said = (
        f"On {size(text['size_bytes'])} of text, with {count(models[0]['parameters'])} parameters{each} and "
        f"{size(models[0]['tokens'])} read in training: {best(models)}"
    )
    behind = [_name(model) for model in models if model["validation_bits_per_byte"] >= train["bigram_bits_per_byte"]]
    said += f" {start(listed(behind))}: {NOT_LEARNED}." if behind else ""
    if len(models) > 1:
        times = [f"{model['seconds']:.0f} s with {_name(model)}" for model in models]
        said += f" Training took {listed(times)}."
    return [said]


def _answer_about_order(time: Results | None) -> list[str]:
    rows = [row for row in (time or {}).get("chains", []) if row["direction"] == "forward"]
    longest = max((row["length_tokens"] for row in rows), default=0)
    at = {row["layer"]: row["steps"] for row in rows if row["length_tokens"] == longest}
    layers = {"attention 8 heads": "attention", "gru": MIXERS["gru"], "lstm": MIXERS["lstm"]}
    chosen = [f"{count(at[layer])} in {name}" for layer, name in layers.items() if layer in at]
    if not chosen:
        return []
    return [f"To read {count(longest)} tokens, steps that must wait for each other: {listed(chosen)}."]


def _answer_about_recall(part: Results | None) -> list[str]:
    models = [model for model in (part or {}).get("models", []) if model["runs"]]
    if not models:
        return []
    shares = listed([f"{_name(model)} {percent(model['runs'][0]['accuracy'])}" for model in models])
    return [f"Asked for the values of {models[0]['runs'][0]['pairs']} pairs seen before, right answers: {shares}."]


def _cost(models: list[Results]) -> list[str]:
    ranked = sorted(models, key=lambda model: -model["tokens_per_second"])
    rates = [f"{_name(model)} {count(model['tokens_per_second'])}" for model in ranked]
    said = [f"Bytes read per second of training: {listed(rates)}."]
    cut = [
        f"{_name(model)} at step {count(model['steps'])} of {count(model['steps_planned'])}"
        for model in models
        if not model["finished"]
    ]
    return [*said, f"Stopped early: {listed(cut)}."] if cut else said


def _judged(train: Results) -> list[Results]:
    return [model for model in train["models"] if model["validation_bits_per_byte"] is not None]


def _name(model: Results) -> str:
    return MIXERS[model["mixer"]]
