"""SGLang's offline Engine, as a script: python offline.py CHECKPOINT IDS.json -> log-probs of each prompt, as JSON."""

import json
import sys

if __name__ == "__main__":  # SGLang spawns its workers, which import this file again
    import sglang

    prompts = json.loads(sys.argv[2])
    engine = sglang.Engine(
        model_path=sys.argv[1], skip_tokenizer_init=True, device="cpu", disable_overlap_schedule=True,
        max_total_tokens=4096, log_level="info",
    )  # fmt: skip
    params = [
        dict(temperature=1.0, max_new_tokens=16, ignore_eos=True, sampling_seed=100 + i) for i in range(len(prompts))
    ]
    outs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=0)
    print("RESULT", json.dumps([[x[0] for x in out["meta_info"]["output_token_logprobs"]] for out in outs]), flush=True)
    engine.shutdown()
