package cluster

// tfConfigSource is TF_CONFIG, if it describes a cluster. The workers are numbered as in TensorFlow: the
// chief first.
var tfConfigSource = source{
	name: "TF_CONFIG", key: "tf_config", known: `TF_CONFIG with a "cluster"`, depth: stated,
	detect: func(d *Discovery) bool {
		if d.env("TF_CONFIG") == "" && d.env(EnvTFConfigFile) == "" {
			return false
		}
		spec, err := (&TFConfig{Lookup: d.Getenv, ReadFile: d.ReadFile}).Spec()
		return err != nil || len(spec) > 0
	},
	read: func(r *reading, j *Job) {
		r.text("TF_CONFIG")
		r.text(EnvTFConfigFile)
		c := &TFConfig{Lookup: r.d.Getenv, ReadFile: r.d.ReadFile}
		var err error
		if j.Spec, err = c.Spec(); err == nil {
			j.Task, err = c.Task()
		}
		if err == nil {
			err = j.fromSpec()
		}
		if err != nil && r.err == nil {
			r.err = err
		}
	},
}

// fromSpec derives the indices from the spec and the task.
func (j *Job) fromSpec() error {
	if !j.Task.Known() {
		return errorf("TF_CONFIG has a cluster with %s, but not the task of this process: it needs \"task\": {\"type\": "+
			"\"worker\", \"index\": 0}",
			j.Spec.jobsText())
	}
	for _, job := range []string{Chief, Worker} {
		if !j.Spec.Dense(job) {
			return errorf("TF_CONFIG lists only the tasks %v of job '%s', so the number of workers is unknown: list all",
				j.Spec.Indices(job), job)
		}
	}
	if err := j.Spec.check(j.Task); err != nil {
		return err
	}
	switch j.Task.Type {
	case PS:
		return errorf("TF_CONFIG makes this process %s: synchronous training has no parameter servers; remove the job 'ps'",
			j.Task)
	case Evaluator: // evaluates in parallel with the training, as a single-process job
		j.Worker, j.Workers = 0, 1
		return nil
	}
	var err error
	if j.Worker, err = IDInCluster(j.Spec, j.Task); err != nil {
		return err
	}
	if j.Workers, err = WorkerCount(j.Spec, j.Task.Type); err != nil {
		return err
	}
	if j.Workers == 1 {
		return nil
	}
	first := Task{Type: Worker}
	if j.Spec.Count(Chief) > 0 {
		first.Type = Chief
	}
	address, err := j.Spec.Address(first)
	if err != nil {
		return err
	}
	if j.Store, err = storeURL(address); err != nil {
		return errorf("TF_CONFIG: the address of %s: %w", first, err)
	}
	return nil
}
