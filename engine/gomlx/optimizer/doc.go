// Package optimizer provides SGD with momentum, Adam and RMSprop as Keras defines them. They implement
// GoMLX's optimizer.Interface, so they work with [gomlx.Model.Optimizer] and with GoMLX's trainer. They use
// its hyperparameters "learning_rate", "clip_step_by_value" and "clip_nan".
//
//	m := &gomlx.Model{
//		…
//		Optimizer: optimizer.SGD().LearningRate(0.1).Momentum(0.9).Nesterov(true).Done(),
//	}
//
// They differ from those in GoMLX's ml/train/optimizer:
//
//   - [SGD] has momentum and Nesterov momentum, which GoMLX lacks, and a constant learning rate. GoMLX's divides the
//     rate by the square root of the step unless it is configured WithDecay(false).
//   - [RMSProp] divides by the root of the plain moving average of squared gradients, with epsilon under the root.
//     GoMLX's corrects the average's bias, as Adam does, and adds epsilon to the root: its first steps are up to
//     1/sqrt(1-rho) times smaller.
//   - [Adam] adds epsilon to the root of the second moment before the bias correction, as Keras and the paper's
//     efficient variant do. GoMLX's adds it after. They differ where gradients are below about 1e-5.
//   - All three take a [Schedule] and a decoupled weight decay. [Scheduled] gives GoMLX's optimizers a schedule, and
//     [EMA] makes any optimizer keep moving averages of the variables. A schedule counts updates, so gradients that are
//     only accumulated or recorded do not move it.
//
// The state of an optimizer is float32, or the type of the loss if that is wider. Its variables are "/SGD/…",
// "/Adam/…", "/RMSProp/…" or "/EMA/…", GoMLX's counter "/global_step", and the learning rate in
// "/optimizers/learning_rate", which can be written between steps unless a schedule sets it.
package optimizer
