"""Makes or reads LoRA adapters with torch, transformers and peft.

python peft_reference.py make|read BASE ADAPTERS IDS.npy LOGITS.npy
"""

import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def main() -> None:
    what, base, folder, ids, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if what == "make":
        torch.manual_seed(0)
        config = LoraConfig(
            r=2,
            lora_alpha=3,
            use_rslora=True,
            target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    else:
        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(ids)).long()).logits
    np.save(out, logits.numpy())


main()
