module github.com/lockstep-ml/lockstep

go 1.26
