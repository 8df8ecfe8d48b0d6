treaty audit --compare secureboost,secureboost:sums=open:allow_exact_sums=true,federboost-vertical:epsilon=8 \
    --data bank/customers.csv --label defaulted --split "age,income,months_known/debt,late_payments,cards" --trees 10
