"""How good translations are, by what others measure them with."""


def scores(predicted: list[str], references: list[str]) -> tuple[dict[str, float], str]:
    """BLEU and chrF (0 to 100, higher is better), CER and WER (parts that are wrong, lower is
    better) of all sentences together, and sacrebleu's signature, which says how it counted."""
    import jiwer  # only here, because training alone needs neither of the two
    import sacrebleu

    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    # A list of references for each sentence would be transposed: one list has one of each.
    found = {
        "bleu": bleu.corpus_score(predicted, [references]).score,
        "chrf": chrf.corpus_score(predicted, [references]).score,
        "cer": jiwer.cer(references, predicted),
        "wer": jiwer.wer(references, predicted),
    }
    return found, f"{bleu.get_signature()}"
