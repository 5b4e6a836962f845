"""Train a small Llama on the Python manual with transformers' Trainer."""

from pydoc_data.topics import topics

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from embedlayer.integrations import patch_trainer

text = "\n\n".join(topics.values())
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator([text], vocab_size=2000, show_progress=False)
ids = tokenizer.encode(text).ids
blocks = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)]
dataset = [{"input_ids": block, "labels": block} for block in blocks]

set_seed(0)
sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
args = TrainingArguments(
    output_dir="out/trainer",
    max_steps=40,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=dataset,
)
patch_trainer(trainer)
trainer.train()
trainer.save_model()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
