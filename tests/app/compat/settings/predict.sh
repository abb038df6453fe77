python predictor.py \
    --model_name_or_path MODEL \
    --batch_size 2 --src_length 300 --max_length 350 \
    --data_file dev.json \
    --output_file output.json --device cpu \
    --inference_model \
    --quant_type weight_only_int8 \
    --dtype float32 --mode "dynamic"
