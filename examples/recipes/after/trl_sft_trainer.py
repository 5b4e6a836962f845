"""Fine-tune a small Qwen2 on questions about the Python manual with TRL's SFTTrainer."""

from pydoc_data.topics import topics

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from embedlayer.integrations import patch_trainer

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
bpe.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=2000, special_tokens=["<pad>", "<eos>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
prompts = [f"What does the manual say about {name}?\n" for name in topics]
dataset = Dataset.from_dict({"prompt": prompts, "completion": [text[:500] for text in topics.values()]})

set_seed(0)
sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
config = Qwen2Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1)
model = Qwen2ForCausalLM(config)
args = SFTConfig(
    output_dir="out/trl",
    max_steps=40,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    max_length=128,
    bf16=False,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=dataset,
    processing_class=tokenizer,
)
patch_trainer(trainer)
trainer.train()
trainer.save_model()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
