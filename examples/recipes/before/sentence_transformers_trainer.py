"""Train a small sentence encoder on the Python manual: the first half of a topic should find the second."""

from pydoc_data.topics import topics

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
bpe.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=2000, special_tokens=["[PAD]"]))
PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="[PAD]", model_max_length=64).save_pretrained("out/bert")
set_seed(0)
sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
BertModel(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).save_pretrained("out/bert")

model = SentenceTransformer("out/bert")
halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in topics.values()]
dataset = Dataset.from_dict({"anchor": [first for first, _ in halves], "positive": [second for _, second in halves]})
args = SentenceTransformerTrainingArguments(
    output_dir="out/sentence-transformers",
    max_steps=40,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=dataset,
    loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
model.save_pretrained("out/sentence-transformers")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
