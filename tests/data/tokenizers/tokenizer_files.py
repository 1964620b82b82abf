"""Definitions of tokenizers with chosen special tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def plain_definition(*specials: str) -> str:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials),
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(["ab"], trainer)
    return learner.to_str()
