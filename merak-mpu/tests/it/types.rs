use merak_mpu::{
    Buffer, Communicator, Engine, Error, Group, Member, Message, Mpu, Packet, Pending, Topology,
};

fn assert_send_and_sync<T: Send + Sync + ?Sized>() {}

fn assert_send<T: Send + ?Sized>() {}

#[test]
fn handles_may_be_shared_between_threads() {
    assert_send_and_sync::<Mpu>();
    assert_send_and_sync::<Member>();
    assert_send_and_sync::<Group>();
    assert_send_and_sync::<Topology>();
    assert_send_and_sync::<Error>();
    assert_send_and_sync::<Packet>();
}

#[test]
fn a_started_operation_may_be_waited_for_on_another_thread() {
    assert_send::<Pending<Box<dyn Buffer>>>();
    assert_send::<Pending<Message>>();
}

#[test]
fn the_seams_are_dyn_safe() {
    assert_send_and_sync::<dyn Buffer>();
    assert_send_and_sync::<dyn Communicator>();
    assert_send_and_sync::<dyn Engine>();
}
