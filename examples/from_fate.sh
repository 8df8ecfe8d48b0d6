treaty convert ../examples/fate/train_conf.json --parties bank,shop --label defaulted --id customer
